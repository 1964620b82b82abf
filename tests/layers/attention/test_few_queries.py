"""A decode step's products in the cache's own layout, against those by key head."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import few_queries
from pallas_kernels.target import Target, as_if
from recurjax.layers.attention import (
    AttentionConfig,
    SelfAttention,
    empty_key_value_cache,
    softmax,
)
from recurjax.layers.initialization import InitConfig
from recurjax.layers.position import Alibi, Rope
from recurjax.plan.hlo import array_bytes, parse
from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE
from tests.marks import slow_except
from tests.tolerances import assert_gradients_close, assert_values_close

B, S, E, D = 3, 11, 8, 12
H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
CASES = {
    "multi_head": {"heads": (4, 4)},
    "grouped": {"heads": (6, 3), "queries": 3},
    "multi_query": {"heads": (4, 1), "bias": True},
    "all_of_it": {"heads": (4, 2), "queries": 2, "soft_cap": 1.5, "bias": True},
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES]
    + [("grouped", "bfloat16"), ("all_of_it", "float64")],
)
def test_values_and_gradients_equal_those_by_key_head(case, dtype, monkeypatch):
    options = dict(CASES[case])
    (H, K), T = options.pop("heads"), options.pop("queries", 1)
    draw = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        shapes = {"q": (B, T, H, E), "k": (B, S, K, E), "v": (B, S, K, E)}
        arrays = {
            name: jnp.asarray(draw.normal(size=shape), dtype)
            for name, shape in shapes.items()
        }
        if options.pop("bias", False):
            wide = jnp.promote_types(dtype, jnp.float32)
            arrays["bias"] = jnp.asarray(draw.normal(size=(1, H, T, S)), wide)
        mask = jnp.asarray(draw.random(size=(B, 1, T, S)) < 0.6).at[1].set(False)
        g = draw.normal(size=shapes["q"]).astype(np.float32)

        def run(few: bool):
            monkeypatch.setattr(few_queries, "pay_off", lambda *_: few)

            @partial(jax.jit, compiler_options=QUICK_COMPILE)
            @partial(jax.value_and_grad, has_aux=True)
            def both(arrays):
                o = softmax.attend(
                    **arrays, scale=0.3, causal=False, mask=mask, **options
                )
                return jnp.sum(o.astype(jnp.float32) * g), o

            (_, o), gradients = both(arrays)
            return o, gradients

        (got, got_gradients), (want, want_gradients) = run(True), run(False)
    assert got.dtype == jnp.dtype(dtype)
    assert_values_close(got, want, dtype)
    assert_gradients_close(got_gradients, want_gradients, dtype)


@pytest.mark.parametrize(
    "dtype", slow_except(["bfloat16"], ["float32", "bfloat16", "float64"], slow=())
)
@pytest.mark.parametrize("part", [4, S])
@pytest.mark.parametrize("K", [1, 3])
def test_one_row_on_a_gpu_sums_over_parts_of_the_slots(K, part, dtype, monkeypatch):
    """Parts of 4 leave 3 of 11 slots over; with one part of all nothing is cut."""
    monkeypatch.setattr(few_queries, "PART", part)
    H, draw = 3, np.random.default_rng(3)
    with jax.enable_x64(dtype == "float64"):
        shapes = (1, 1, H, E), (1, S, K, E), (1, S, K, E)
        arrays = [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]
        mask = jnp.asarray(draw.random(size=(1, 1, 1, S)) < 0.6)

        def run(*arrays):
            return softmax.attend(*arrays, scale=0.3, causal=False, mask=mask)

        want = run(*arrays)
        with as_if(H100):
            barriers = str(jax.make_jaxpr(run)(*arrays)).count("optimization_barrier")
            got = jax.jit(run, compiler_options=QUICK_COMPILE)(*arrays)
    assert barriers == (part < S)
    assert got.dtype == jnp.dtype(dtype)
    assert_values_close(got, want, dtype)


@pytest.mark.parametrize("window", [None, 6])
def test_a_step_of_ragged_rows_is_the_same_by_both(window, monkeypatch):
    """Rows before, at and past the ring's end; the last one's token is padding."""
    cache = _cache(slots=S if window is None else window + 1)
    layer = _layer(window, Alibi())
    x = jnp.asarray(np.random.default_rng(2).normal(size=(B, 1, D)), jnp.float32)
    lengths = jnp.asarray([1, 1, 0])
    tokens = Tokens(jnp.zeros((B, 1), jnp.int32), lengths=lengths)

    def run(few: bool):
        monkeypatch.setattr(few_queries, "pay_off", lambda *_: few)
        return jax.jit(layer.__call__, compiler_options=QUICK_COMPILE)(x, cache, tokens)

    (got, got_cache), (want, want_cache) = run(True), run(False)
    assert_values_close(got[:2], want[:2])
    jax.tree.map(np.testing.assert_array_equal, got_cache, want_cache)


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="other devices keep products by key head"
)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_copies_no_cache(batch):
    """The only arrays of a cache's size that it makes are written in their place."""
    layer = _layer(None, Rope())
    cache = empty_key_value_cache(1, batch, 512, 2, E, jnp.float32)
    tokens = Tokens(jnp.zeros((batch, 1), jnp.int32))

    @partial(jax.jit, donate_argnums=1)
    def step(x, cache):
        return layer(x, cache, tokens)

    compiled = step.lower(jnp.ones((batch, 1, D)), cache).compile()
    module = parse(compiled.as_text())
    size = cache.keys.nbytes
    views = ("parameter", "bitcast", "tuple", "get-tuple-element")
    result = [
        name
        for name, instruction in module.computations[module.entry].items()
        if instruction.opcode not in views
        and array_bytes(instruction.type, on_chip=True) >= size
    ]
    assert len(result) == 2 and all("scatter" in name for name in result), result
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * size
    assert memory.temp_size_in_bytes < size


def _layer(window, position) -> SelfAttention:
    config = AttentionConfig(heads=4, key_heads=2, head_width=E, position=position)
    like = jax.eval_shape(
        lambda: SelfAttention(
            config, D, InitConfig(), window=window, layer=0, layers=1, rngs=nnx.Rngs(0)
        )
    )
    draw = np.random.default_rng(3)
    return jax.tree.map(
        lambda leaf: jnp.float32(draw.normal(size=leaf.shape) / 2), like
    )


def _cache(slots: int):
    draw = np.random.default_rng(1)
    empty = empty_key_value_cache(1, B, slots, 2, E, jnp.float32)
    keys, values = (jnp.float32(draw.normal(size=empty.keys.shape)) for _ in "kv")
    position = jnp.asarray([2, slots - 1, slots - 2], jnp.int32)
    if slots < S:
        position = position.at[1].add(slots)
    return empty._replace(keys=keys, values=values, position=position)
