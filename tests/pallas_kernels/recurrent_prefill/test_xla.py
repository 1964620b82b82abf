"""The XLA path against the definition: values and gradients, every switch, float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent_prefill import Rows, empty_cache, recurrent_prefill
from pallas_kernels.recurrent_prefill.reference import recurrent_prefill_reference
from tests.compiling import QUICK_COMPILE
from tests.pallas_kernels.recurrent_prefill.layers import (
    BATCH,
    LENGTH,
    SPECS,
    WIDTH,
    rows,
    spec,
    weights,
)
from tests.tolerances import assert_close, assert_gradients_close, assert_values_close

quick = partial(jax.jit, compiler_options=QUICK_COMPILE)
slow = partial(pytest.param, marks=pytest.mark.slow)
sweep = partial(pytest.param, marks=pytest.mark.sweep)
LAYERS = 2
PLAIN, GROUPED, FREE, ABLATED, BLOCKED = SPECS
# (spec, schedule, tile in blocks, packed documents)
CASES = [
    (GROUPED, "prefix", 4, False),
    slow(BLOCKED, "wavefront", 2, True),
    sweep(PLAIN, "wavefront", 4, True),
    sweep(FREE, "wavefront", 2, False),
    sweep(ABLATED, "prefix", 16, False),
    slow(PLAIN, "naive", None, False),
    sweep(PLAIN, "prefix", 1, True),
    sweep(GROUPED, "wavefront", 3, True),
    sweep(GROUPED, "naive", None, True),
    sweep(BLOCKED, "naive", None, False),
    sweep(BLOCKED, "prefix", 1, True),
    sweep(FREE, "prefix", 5, True),
    sweep(ABLATED, "wavefront", 13, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule", "tiles", "packed"), CASES)
def test_values_and_gradients_are_the_definition(name, schedule, tiles, packed):
    layer = SPECS[name]
    with jax.enable_x64(True):
        x, g = jnp.asarray(rows(1)), jnp.asarray(rows(2))
        segments = None
        if packed:
            segments = jnp.asarray([[0] * 6 + [1] * 7, [0] * 1 + [1] * 8 + [2] * 4])
        w = weights(layer, layers=LAYERS)
        tile = None if tiles is None else tiles * layer.block

        def ours(x, w):
            cache = empty_cache(LAYERS, BATCH, 0, WIDTH, layer)
            z, _ = recurrent_prefill(
                x,
                w,
                cache,
                spec=layer,
                rows=Rows(segments=segments),
                schedule=schedule,
                tile=tile,
            )
            return jnp.sum(g * z), z

        def theirs(x, w):
            z = recurrent_prefill_reference(x, w, spec=layer, segments=segments)
            return jnp.sum(g * z), z

        gradient = partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        (_, z), got = quick(gradient(ours))(x, w)
        (_, want_z), want = quick(gradient(theirs))(x, w)
        assert_values_close(z, want_z, "float64")
        assert_gradients_close(got, want, "float64")


@pytest.mark.parametrize(
    "absent", [("b_q", "b_k", "b_up"), sweep(("b_v", "b_gate")), sweep(("b_q", "b_v"))]
)
def test_each_bias_stands_for_itself(absent):
    """Those of one product lie side by side, and some of them can be missing."""
    layer = SPECS[GROUPED]
    with jax.enable_x64(True):
        x, g = jnp.asarray(rows(1)), jnp.asarray(rows(2))
        w = weights(layer, layers=LAYERS)._replace(**dict.fromkeys(absent))

        def ours(x, w):
            cache = empty_cache(LAYERS, BATCH, 0, WIDTH, layer)
            return jnp.sum(g * recurrent_prefill(x, w, cache, spec=layer)[0])

        def theirs(x, w):
            return jnp.sum(g * recurrent_prefill_reference(x, w, spec=layer))

        gradient = partial(jax.value_and_grad, argnums=(0, 1))
        got, want = (quick(gradient(f))(x, w) for f in (ours, theirs))
        assert_values_close(got[0], want[0], "float64")
        assert_gradients_close(got[1], want[1], "float64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [(BLOCKED, "prefix"), sweep(GROUPED, "wavefront"), sweep(PLAIN, "prefix")],
)
def test_gradients_flow_through_a_ragged_cache(name, schedule):
    """Three calls, rows at their own positions, give the gradients of one."""
    layer = SPECS[name]
    with jax.enable_x64(True):
        x, g = jnp.asarray(rows(1)), jnp.asarray(rows(2))
        w = weights(layer, layers=LAYERS)
        lengths = jnp.asarray([6, 4])

        def ours(x, w):
            cache = empty_cache(LAYERS, BATCH, LENGTH, WIDTH, layer)
            run = partial(
                recurrent_prefill, spec=layer, schedule=schedule, tile=2 * layer.block
            )
            first, cache = run(x[:, :6], w, cache, rows=Rows(lengths=lengths))
            second = jnp.stack([x[0, 6:12], x[1, 4:10]])
            second, cache = run(second, w, cache)
            last, _ = run(jnp.stack([x[0, 12:13], x[1, 10:11]]), w, cache)
            z = [jnp.concatenate([first[0], second[0], last[0]])]
            z += [jnp.concatenate([first[1, :4], second[1], last[1]])]
            return jnp.sum(g[0] * z[0]) + jnp.sum(g[1, :11] * z[1])

        def theirs(x, w):
            z = recurrent_prefill_reference(x, w, spec=layer)
            return jnp.sum(g[0] * z[0]) + jnp.sum((g * z)[1, :11])

        gradient = partial(jax.value_and_grad, argnums=(0, 1))
        got, want = (quick(gradient(f))(x, w) for f in (ours, theirs))
        assert_values_close(got[0], want[0], "float64")
        assert_gradients_close(got[1], want[1], "float64")


@pytest.mark.slow
def test_gradients_are_finite_differences():
    layer = SPECS[PLAIN]
    with jax.enable_x64(True):
        x, w = jnp.asarray(rows(1)), weights(layer, layers=LAYERS)
        to_x, to_w = jnp.asarray(rows(3)), weights(layer, layers=LAYERS)

        def loss(step):
            moved = jax.tree.map(lambda a, b: a + step * b, (x, w), (to_x, to_w))
            cache = empty_cache(LAYERS, BATCH, 0, WIDTH, layer)
            z, _ = recurrent_prefill(
                *moved, cache, spec=layer, schedule="wavefront", tile=4
            )
            return jnp.sum(z**2)

        h, value = 1e-5, quick(loss)
        slope = (value(h) - value(-h)) / (2 * h)
        np.testing.assert_allclose(quick(jax.grad(loss))(0.0), slope, rtol=1e-7)


@pytest.mark.parametrize("length", [1, sweep(12), sweep(16), slow(17)])
def test_any_length_fits_any_tile(length):
    layer = SPECS[PLAIN]
    with jax.enable_x64(True):
        x, w = jnp.asarray(rows(1, length)), weights(layer, layers=LAYERS)
        want = recurrent_prefill_reference(x, w, spec=layer)
        cache = empty_cache(LAYERS, BATCH, 0, WIDTH, layer)
        for schedule in ("prefix", "wavefront"):
            got, _ = quick(
                partial(recurrent_prefill, spec=layer, schedule=schedule, tile=4)
            )(x, w, cache)
            assert_values_close(got, want, "float64")


def test_bfloat16_costs_about_its_own_rounding():
    """Error of z's change, z - x, as a share of its largest value: under 3 %."""
    narrow = spec(dtype="bfloat16")
    x = jnp.asarray(rows(1), jnp.float32)
    w = weights(narrow, layers=1, dtype="float32")
    want = recurrent_prefill_reference(x, w, spec=narrow)
    cache = empty_cache(1, BATCH, LENGTH, WIDTH, narrow)
    assert cache.keys.dtype == jnp.bfloat16
    got, cache = quick(partial(recurrent_prefill, spec=narrow, tile=4))(x, w, cache)
    assert got.dtype == jnp.float32 and cache.keys.dtype == jnp.bfloat16
    # Looser than the table: thirteen positions feed their rounding to each other.
    assert_close(got - x, want - x, dtype="bfloat16", tolerance=3e-2)
    assert not np.array_equal(got, want)


def test_the_backward_pass_keeps_memory_linear_in_length():
    layer = spec(dtype="float32")
    w = weights(layer, layers=1, dtype="float32")

    def temporary_bytes(length: int) -> int:
        x = jax.ShapeDtypeStruct((BATCH, length, 8), jnp.float32)

        def loss(x, w):
            cache = empty_cache(1, BATCH, 0, WIDTH, layer)
            return jnp.sum(
                recurrent_prefill(x, w, cache, spec=layer, schedule="prefix", tile=8)[0]
            )

        compiled = quick(jax.grad(loss, argnums=(0, 1))).lower(x, w).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary_bytes(1024), temporary_bytes(4096)
    assert large < 4.2 * small
