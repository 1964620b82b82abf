"""jax's TPU kernels in their interpreter, ALiBi's channels, and what compiles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.target import Target, as_if
from recurjax.layers.attention import attend
from recurjax.layers.attention.alibi_channels import CHANNELS, with_alibi_channels
from recurjax.layers.attention.splash import attend_by_splash
from recurjax.layers.position import Alibi, alibi_slopes
from recurjax.sharding import MeshConfig, make_mesh
from tests.absent_compilers import COMPILERS, ask
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close, assert_values_close

T = 256
TPU = Target(platform="tpu", kind="TPU v5 lite")
CASES = {
    "packed_rows_with_alibi": {"segments": True, "slopes": True},
    "capped_window": {"window": 100, "soft_cap": 2.0},
}


@pytest.mark.parametrize("case", CASES)
def test_splash_equals_plain_attention(case):
    draw = np.random.default_rng(0)
    options = {"window": None, "segments": None, "slopes": None, "soft_cap": None}
    options |= CASES[case]
    if options["segments"]:
        options["segments"] = jnp.asarray(np.sort(draw.integers(3, size=(1, T))))
    if options["slopes"]:
        options["slopes"] = alibi_slopes(4, Alibi())
    shapes = {"q": (1, T, 4, 16), "k": (1, T, 2, 16), "v": (1, T, 2, 16)}
    arrays = {
        name: jnp.asarray(draw.normal(size=shape), jnp.bfloat16)
        for name, shape in shapes.items()
    }

    def both(attention):
        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        @partial(jax.value_and_grad, has_aux=True)
        def run(arrays):
            o = attention(**arrays, scale=0.25, **options).astype(jnp.float32)
            return jnp.sum(o * o), o

        (_, o), gradients = run(arrays)
        return o, gradients

    got = both(partial(attend_by_splash, interpret=True))
    want = both(partial(attend, causal=True, implementation="xla"))
    assert_values_close(got[0], want[0], "bfloat16")
    assert_gradients_close(got[1], want[1], "bfloat16")


@pytest.mark.parametrize("heads", [4, 6])
def test_channels_add_the_slope_times_the_position(heads):
    """As exactly as float32 adds; slopes of 6 heads are no powers of two."""
    length, scale = 4096, 24**-0.5
    nothing = jnp.zeros((1, length, heads, 8), jnp.bfloat16)
    slopes = alibi_slopes(heads, Alibi())
    q, k = with_alibi_channels(nothing, nothing, slopes, scale=scale)
    assert q.shape[-1] == k.shape[-1] == 8 + CHANNELS
    wide = np.asarray(q, np.float64)[0, 0], np.asarray(k, np.float64)[0]
    got = scale * np.einsum("he,she->hs", *wide)
    want = slopes[:, None] * np.arange(length)
    np.testing.assert_allclose(got, want, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "dtype must be bfloat16, got float32"),
        ({"length": 200}, "length must be a multiple of 128, got 200"),
        ({"mask": jnp.ones((1, 1, T, T), bool)}, "dense mask or bias"),
        ({"slopes": alibi_slopes(4, Alibi()), "soft_cap": 1.0}, "ALiBi's bias too"),
        ({"target": Target(platform="cpu", kind="cpu")}, "needs a TPU, found cpu"),
        ({"batch": 3}, "the mesh's data does not divide the call"),
    ],
)
def test_splash_by_name_runs_or_says_why_not(change, reason):
    options = dict(change)
    shape = (options.pop("batch", 2), options.pop("length", T), 4, 16)
    q = jax.ShapeDtypeStruct(shape, options.pop("dtype", "bfloat16"))
    target = options.pop("target", TPU)
    options |= {"causal": True, "scale": 1.0, "implementation": "splash"}
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
    with (
        as_if(target),
        jax.set_mesh(mesh),
        pytest.raises(NotImplementedError, match=f"attend: splash: .*{reason}"),
    ):
        jax.eval_shape(partial(attend, **options), q, q, q)


CASES_TO_COMPILE = "tests.layers.attention.compile_cases"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "case", "kernel"),
    [
        ("v5e:2x2", "packed_rows_with_alibi", "tpu_custom_call"),
        pytest.param(
            "v6e:2x2", "capped_window", "tpu_custom_call", marks=pytest.mark.sweep
        ),
        pytest.param(
            "h100", "packed_rows", "__gpu$xla.gpu.triton", marks=pytest.mark.sweep
        ),
    ],
)
def test_training_compiles_for_accelerators_in_memory_of_t(target, case, kernel):
    """Both passes by kernels, of this length whose T x T logits would be 2 GB."""
    if not (COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")
    summary = ask(
        target, "tests.compile_target:summary_of", f"{CASES_TO_COMPILE}:{case}"
    )
    assert kernel in summary["custom_calls"]
    assert summary["temp_bytes"] < 2**28
