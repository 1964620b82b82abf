"""Attention in bands against a loop over queries in float64, and what it holds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.layers.attention import attend, bands
from recurjax.layers.attention.bands import attend_in_bands
from recurjax.layers.position import Alibi, alibi_slopes
from tests.compiling import QUICK_COMPILE, sizes
from tests.layers.attention.attention_oracle import attention_oracle
from tests.tolerances import assert_gradients_close, assert_values_close

B, T, H, K, E = 2, 13, 4, 2, 6
ALL = {"segments": True, "slopes": True, "soft_cap": 1.5}
CASES = {
    "causal": {},
    "packed_rows": {"segments": True},
    "alibi_by_multi_query": {"slopes": True, "key_heads": 1},
    "narrow_window": {"window": 3, **ALL},
    "window_of_itself": {"window": 0},
    "all_but_a_window": ALL,
}


@pytest.mark.parametrize(
    ("case", "dtype", "few_cores"),
    [(case, "float32", True) for case in CASES]
    + [("all_but_a_window", "float64", False), ("narrow_window", "bfloat16", False)],
)
def test_values_and_gradients_equal_the_loop(case, dtype, few_cores, monkeypatch):
    _cut_small(monkeypatch, few_cores=few_cores)
    options = dict(CASES[case])
    key_heads, window = options.pop("key_heads", K), options.get("window")
    draw = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        shapes = [(B, T, H, E), *[(B, T, key_heads, E)] * 2]
        q, k, v = (jnp.asarray(2 * draw.normal(size=s), dtype) for s in shapes)
        g = draw.normal(size=q.shape).astype(np.float32)
        distance = np.arange(T)[:, None] - np.arange(T)
        visible = np.broadcast_to(distance >= 0, (B, H, T, T))
        bias = None
        if window is not None:
            visible = visible & (distance <= window)
        if options.pop("segments", False):
            segments = np.sort(draw.integers(3, size=(B, T)), axis=1)
            visible = visible & (segments[:, :, None] == segments[:, None])[:, None]
            options["segments"] = jnp.asarray(segments)
        if options.pop("slopes", False):
            slopes = alibi_slopes(H, Alibi())
            bias = np.broadcast_to(-slopes[:, None, None] * distance, visible.shape)
            wide = jnp.promote_types(dtype, jnp.float32)
            options["slopes"] = jnp.asarray(slopes, wide)

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        @partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
        def run(q, k, v):
            o = attend_in_bands(q, k, v, scale=0.3, **options)
            return jnp.sum(o.astype(jnp.float32) * g), o

        (_, o), gradients = run(q, k, v)
    want_o, want = attention_oracle(
        *(q, k, v, g),
        scale=0.3,
        visible=visible,
        bias=bias,
        soft_cap=options.get("soft_cap"),
    )
    assert o.dtype == jnp.dtype(dtype)
    assert_values_close(o, want_o, dtype)
    assert_gradients_close(gradients, tuple(want[name] for name in "qkv"), dtype)


def _cut_small(monkeypatch, *, few_cores: bool) -> None:
    """Cuts 13 tokens into several blocks and bands, by the one rule or the other."""
    for name, value in {"_BANDS": 3, "_LEAST_ROWS": 2, "_ROW_MULTIPLE": 1}.items():
        monkeypatch.setattr(bands, name, value)
    for name in ("_IN_CACHE", "_IN_MEMORY"):
        monkeypatch.setattr(bands, name, 60)
    real = bands.choose_cut
    monkeypatch.setattr(
        "recurjax.layers.attention.bands.choose_cut",
        lambda *shape, **_: real(*shape, few_cores=few_cores),
    )


@pytest.mark.parametrize("length", [1, 63, 256, 1000, 1031, 4096, 65536])
@pytest.mark.parametrize("window", [None, 0, 100, 5000])
@pytest.mark.parametrize("few_cores", [True, False])
def test_every_cut_covers_each_query_once_and_all_keys_that_it_sees(
    length, window, few_cores
):
    cut = bands.choose_cut(24, 2, length, window, few_cores=few_cores)
    assert 24 % cut.units == 0 and len(cut.bands) <= bands._BANDS
    expected = 0
    for band in cut.bands:
        assert band.first == expected
        expected += band.blocks * cut.rows
        # The last real query of the band, and the keys that its block begins with.
        last = min(expected, length) - 1
        block = (last - band.first) // cut.rows
        start = band.first + block * cut.rows - cut.before if band.slides else 0
        reach = last if window is None else min(window, last)
        assert start <= max(last - reach, 0) and start + band.keys > last
    assert length <= expected == cut.padded < length + cut.rows * 8 * len(cut.bands)


@pytest.mark.parametrize("window", [None, 300])
def test_no_array_has_t_times_t_elements(window):
    """In the gradient of packed rows with ALiBi, a cap and all else; nor does XLA."""
    length = 2048
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q, k, v, segments):
        options = {"segments": segments, "slopes": alibi_slopes(2, Alibi())}
        options |= {"window": window, "soft_cap": 30.0, "implementation": "blocks"}
        return jnp.sum(attend(q, k, v, scale=1.0, causal=True, **options))

    gradient = jax.grad(total, argnums=(0, 1, 2))
    program = jax.make_jaxpr(gradient)(x, x, x, segments)
    assert 0 < max(sizes(program.jaxpr)) < length * length / 4
    compiled = jax.jit(gradient, compiler_options=QUICK_COMPILE).lower(
        *(x, x, x, segments)
    )
    temporary = compiled.compile().memory_analysis().temp_size_in_bytes
    assert temporary < 4 * length * length
