"""`attend` against a loop over queries in float64, and what it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.layers.attention import attend, visible_by_position
from tests.compiling import QUICK_COMPILE
from tests.layers.attention.attention_oracle import attention_oracle
from tests.tolerances import assert_gradients_close, assert_values_close

B, H, K, E = 2, 4, 2, 8
CASES = {
    "causal": {},
    "one_token": {"T": 1},
    "window": {"window": 3},
    "window_of_itself": {"window": 0},
    "wide_window": {"window": 50},
    "soft_cap": {"soft_cap": 1.5},
    "bias": {"bias": True},
    "mask": {"mask": True},
    "multi_head": {"key_heads": 4},
    "more_keys_than_queries": {"T": 5, "S": 11, "causal": False, "mask": True},
    "all_of_it": {"window": 4, "soft_cap": 1.5, "bias": True, "mask": True},
    "all_but_the_cap": {"window": 4, "bias": True, "mask": True, "key_heads": 1},
}
WIDE = ["causal", "all_of_it"]
NARROW = ["causal", "all_of_it", "all_but_the_cap"]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES]
    + [(case, "float64") for case in WIDE]
    + [(case, "bfloat16") for case in NARROW],
)
def test_values_and_gradients_equal_the_loop(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        arrays, options, visible = make(dtype=dtype, **CASES[case])
        g = arrays.pop("g")

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        @partial(jax.value_and_grad, has_aux=True)
        def run(arrays):
            o = attend(**arrays, **options)
            return jnp.sum(o.astype(jnp.float32) * g), o

        (_, o), gradients = run(arrays)
        assert o.dtype == jnp.dtype(dtype)
    bias = arrays.get("bias")
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias, np.float64), visible.shape)
    want_o, want = attention_oracle(
        *(arrays[name] for name in "qkv"),
        g,
        scale=options["scale"],
        visible=visible,
        bias=bias,
        soft_cap=options["soft_cap"],
    )
    want["bias"] = want["bias"].sum(0, keepdims=True)
    assert_values_close(o, want_o, dtype)
    assert_gradients_close(gradients, {name: want[name] for name in gradients}, dtype)


def make(
    *,
    dtype: str,
    T: int = 7,
    S: int | None = None,
    key_heads: int = K,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    bias: bool = False,
    mask: bool = False,
):
    """Draws differentiable arrays, the other arguments, and what each query sees."""
    S = T if S is None else S
    draw = np.random.default_rng(0)
    shapes = {"q": (B, T, H, E), "k": (B, S, key_heads, E), "v": (B, S, key_heads, E)}
    arrays = {
        name: jnp.asarray(2 * draw.normal(size=shape), dtype)
        for name, shape in shapes.items()
    }
    arrays["g"] = draw.normal(size=shapes["q"]).astype(np.float32)
    if bias:
        wide = "float64" if dtype == "float64" else "float32"
        arrays["bias"] = jnp.asarray(draw.normal(size=(1, H, T, S)), wide)
    visible = np.ones((B, H, T, S), bool)
    options = {"scale": 0.3, "causal": causal, "window": window, "soft_cap": soft_cap}
    if mask:
        some = draw.random(size=(B, 1, T, S)) < 0.6
        some |= np.eye(T, S, dtype=bool)  # each query sees a key
        visible &= some
        options["mask"] = jnp.asarray(some)
    distance = np.arange(T)[:, None] - np.arange(S)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance <= window
    return arrays, options, visible


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_logits_of_any_size_stay_finite(soft_cap):
    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    @jax.value_and_grad
    def run(q):
        return jnp.sum(attend(q, q, q, scale=1.0, causal=True, soft_cap=soft_cap))

    value, gradient = run(np.full((1, 3, 1, 8), 1e4, np.float32))
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_causal_needs_as_many_queries_as_keys():
    q, k = jnp.ones((1, 2, 1, 8)), jnp.ones((1, 3, 1, 8))
    with pytest.raises(ValueError, match="equally many queries and keys, got 2 and 3"):
        attend(q, k, k, scale=1.0, causal=True)


def test_a_window_needs_causal():
    q = jnp.ones((1, 2, 1, 8))
    with pytest.raises(ValueError, match="window needs causal"):
        attend(q, q, q, scale=1.0, causal=False, window=1)


@pytest.mark.parametrize(
    ("dtype", "head_width", "options", "reason"),
    [
        ("float32", 8, {}, "dtype must be bfloat16 or float16"),
        ("bfloat16", 12, {}, "head width must be a multiple of 8 up to 128, got 12"),
        ("bfloat16", 136, {}, "head width .* got 136"),
        ("bfloat16", 8, {"soft_cap": 1.0}, "soft cap"),
        ("bfloat16", 8, {"mask": np.ones((1, 1, 2, 2), bool)}, "dense mask or bias"),
        ("bfloat16", 8, {"bias": np.ones((1, 1, 2, 2))}, "dense mask or bias"),
        pytest.param(
            *("bfloat16", 8, {}, "needs a GPU with cuDNN, found cpu"),
            marks=pytest.mark.skipif(
                jax.default_backend() != "cpu", reason="the default device is not a CPU"
            ),
        ),
    ],
)
def test_cudnn_by_name_runs_or_says_why_not(dtype, head_width, options, reason):
    q = jnp.ones((1, 2, 1, head_width), dtype)
    options = {
        name: jnp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    with pytest.raises(NotImplementedError, match=f"attend: cudnn: .*{reason}"):
        attend(q, q, q, scale=1.0, causal=True, implementation="cudnn", **options)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN needs a GPU")
@pytest.mark.parametrize(("T", "window"), [(7, None), (128, 5), (128, 0)])
def test_cudnn_equals_xla(T, window):
    draw = np.random.default_rng(0)
    shapes = {"q": (2, T, 4, 64), "k": (2, T, 2, 64), "v": (2, T, 2, 64)}
    arrays = {
        name: jnp.asarray(draw.normal(size=shape), jnp.bfloat16)
        for name, shape in shapes.items()
    }

    @partial(jax.jit, static_argnums=1)
    @partial(jax.value_and_grad, has_aux=True)
    def run(arrays, implementation):
        options = {"causal": True, "window": window, "implementation": implementation}
        o = attend(**arrays, scale=0.125, **options).astype(jnp.float32)
        return jnp.sum(o * o), o

    (_, got), got_gradients = run(arrays, "cudnn")
    (_, want), want_gradients = run(arrays, "xla")
    assert_values_close(got, want, "bfloat16")
    assert_gradients_close(got_gradients, want_gradients, "bfloat16")


def test_visibility_goes_by_position_and_leaves_out_empty_slots():
    queries = jnp.asarray([[4, 5]])
    keys = jnp.asarray([[-1, 0, 3, 4, 5, 6]])
    every = visible_by_position(queries, keys)
    near = visible_by_position(queries, keys, window=1)
    np.testing.assert_array_equal(
        every[0, 0], [[False, True, True, True, False, False]] + [[0, 1, 1, 1, 1, 0]]
    )
    np.testing.assert_array_equal(near[0, 0], [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]])
