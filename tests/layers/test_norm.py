import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.layers.norm import Norm, NormConfig, layer_norm, rms_norm
from tests.tolerances import assert_values_close

X = 3 + 2 * np.random.default_rng(0).normal(size=(2, 5, 8))


def test_rms_norm_divides_by_the_root_mean_square():
    want = X / np.sqrt(np.mean(X**2, axis=-1, keepdims=True) + 0.5)
    assert_values_close(rms_norm(jnp.float32(X), eps=0.5), want)


def test_layer_norm_centres_and_divides_by_the_deviation():
    centred = X - X.mean(axis=-1, keepdims=True)
    want = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 0.5)
    assert_values_close(layer_norm(jnp.float32(X), eps=0.5), want)


def test_a_far_mean_does_not_spoil_the_variance():
    """E[x^2] - E[x]^2 would lose all its digits here."""
    got = layer_norm(jnp.float32(X + 3e4), eps=0.0)
    rounded = (X + 3e4).astype(np.float32).astype(np.float64)
    centred = rounded - rounded.mean(axis=-1, keepdims=True)
    want = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True))
    # The float32 mean of eight numbers near 3e4 is good to 1e-3, one part in 2000.
    np.testing.assert_allclose(got, want, atol=3e-3)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("one_plus", [False, True])
def test_scale_and_bias_start_neutral_and_act_last(kind, one_plus):
    config = NormConfig(kind=kind, bias=True, one_plus=one_plus)
    norm = Norm(config, 8)
    bare = Norm(NormConfig(kind=kind, scale=False), 8)
    assert not jax.tree.leaves(bare)
    x = jnp.float32(X)
    np.testing.assert_array_equal(norm(x), bare(x))
    scale, bias = jnp.arange(8.0), jnp.arange(8.0) - 3
    leaves = {"scale": scale, "bias": bias}
    norm = jax.tree_util.tree_map_with_path(
        lambda path, _: leaves["bias" if "bias" in str(path) else "scale"], norm
    )
    want = bare(x) * (scale + 1 if one_plus else scale) + bias
    assert_values_close(norm(x), want)


def test_bfloat16_is_normalised_in_float32():
    x = jnp.bfloat16(X)
    norm = Norm(NormConfig(kind="rms"), 8)
    assert norm(x).dtype == jnp.bfloat16
    assert rms_norm(x, eps=1e-6).dtype == jnp.float32
    wide = norm(x.astype(jnp.float32))
    np.testing.assert_array_equal(norm(x), wide.astype(jnp.bfloat16))


def test_float64_stays_float64():
    with jax.enable_x64(True):
        y = rms_norm(jnp.asarray(X), eps=1e-6)
        want = X / np.sqrt(np.mean(X**2, axis=-1, keepdims=True) + 1e-6)
        assert_values_close(y, want, "float64")


@pytest.mark.parametrize("options", [{"eps": -1.0}, {"one_plus": True, "scale": False}])
def test_a_wrong_config_is_an_error(options):
    with pytest.raises(ValueError, match="NormConfig"):
        NormConfig(**options)
