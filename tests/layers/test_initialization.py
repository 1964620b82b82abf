import jax
import numpy as np
import pytest

from recurjax.layers.initialization import (
    InitConfig,
    draw_embedding,
    draw_head,
    draw_output_weight,
    draw_weight,
)

KEY = jax.random.key(0)
SHAPE = (256, 128)  # one shape: each compiles a generator of its own


def weight(**options):
    return np.asarray(draw_weight(KEY, SHAPE, fan_in=64, config=InitConfig(**options)))


def output(layer=2, **options):
    config = InitConfig(**options)
    return draw_output_weight(KEY, SHAPE, layer=layer, layers=8, config=config)


def test_weights_are_normal_with_the_std_of_the_config():
    drawn = weight(std=0.5)
    assert drawn.dtype == np.float32
    assert np.std(drawn) == pytest.approx(0.5, rel=0.02)
    assert abs(np.mean(drawn)) < 0.02
    assert np.mean(np.abs(drawn) > 1.0) == pytest.approx(0.0455, rel=0.1)  # 2 sigma


def test_without_a_std_it_is_one_over_the_root_of_the_fan_in():
    assert np.std(weight(std=None)) == pytest.approx(1 / 8, rel=0.02)


def test_truncation_bounds_the_draw_and_does_not_rescale_it():
    drawn = weight(std=0.5, truncate=1.0)
    assert np.abs(drawn).max() <= 0.5
    assert np.abs(drawn).max() > 0.49
    assert np.std(drawn) == pytest.approx(0.5 * 0.5397, rel=0.02)
    assert np.mean(np.abs(drawn) == np.abs(drawn).max()) < 0.01  # drawn, not clipped


def test_a_uniform_draw_has_the_std_of_the_config():
    drawn = weight(distribution="uniform", std=0.5)
    assert np.std(drawn) == pytest.approx(0.5, rel=0.02)
    assert np.abs(drawn).max() <= 0.5 * np.sqrt(3)
    assert np.abs(drawn).max() > 0.85


@pytest.mark.parametrize(
    ("kind", "divisor"), [("same", 1.0), ("depth", 4.0), ("layer", np.sqrt(6))]
)
def test_the_output_projections_shrink_with_depth(kind, divisor):
    drawn = output(std=0.5, output=kind)
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(drawn, weight(std=0.5) / divisor, rtol=1e-6)


def test_the_fan_in_of_an_output_projection_is_all_but_its_last_dimension():
    drawn = output(std=None, output="same")
    assert np.std(drawn) == pytest.approx(1 / np.sqrt(256), rel=0.02)


def test_the_output_projections_can_start_at_zero():
    np.testing.assert_array_equal(output(output="zero"), np.zeros(SHAPE))


def test_weights_stay_float32_under_x64():
    with jax.enable_x64(True):
        layer = jax.numpy.arange(3)[2]
        drawn = output(layer=layer, std=0.5, output="layer")
    assert drawn.dtype == np.float32


@pytest.mark.parametrize(("std", "wanted"), [(0.5, 0.5), (None, 1 / np.sqrt(128))])
def test_embeddings_have_their_own_std(std, wanted):
    drawn = draw_embedding(KEY, SHAPE, config=InitConfig(std=9.0, embedding_std=std))
    assert np.std(drawn) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"head_std": 0.5}, 0.5),
        ({"std": 0.25}, 0.25),
        ({"std": None}, 1 / np.sqrt(256)),
    ],
)
def test_the_head_has_its_own_std_or_that_of_the_weights(options, wanted):
    drawn = draw_head(KEY, SHAPE, config=InitConfig(**options))
    assert np.std(drawn) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("name", ["std", "truncate", "embedding_std", "head_std"])
def test_a_std_that_is_not_positive_is_an_error(name):
    with pytest.raises(ValueError, match=rf"InitConfig\.{name}: must be > 0, got 0.0"):
        InitConfig(**{name: 0.0})
