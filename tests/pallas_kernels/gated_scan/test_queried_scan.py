"""Queries that read a scan's keys: every backend against the definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_scan import (
    BlockSizes,
    api,
    gated_scan,
    key_logits,
    mosaic_tpu,
    queried_scan,
    triton,
    xla,
)
from pallas_kernels.gated_scan.queries import pull_back
from tests.compiling import QUICK_COMPILE
from tests.marks import slow_except
from tests.pallas_kernels.gated_scan.scan_cases import (
    Case,
    check,
    check_finite_difference,
)
from tests.tolerances import assert_values_close

SLOW = pytest.mark.slow
MOSAIC = {"interpret": True, "blocks": BlockSizes(stretch=4)}
MOSAIC_LINKED = {"interpret": True, "blocks": BlockSizes(stretch=2)}

SMALL = Case(12, chunk=4, widths=(64, 32), head=16, logits=True)
WIDE = Case(36, chunk=4, widths=(256, 128), head=64, logits=True)
CASES = {
    "xla": (xla, SMALL._replace(starts=True, lengths=True), {}),
    "xla, one position": (xla, SMALL._replace(positions=1, chunk=1), {}),
    "xla, bfloat16": (xla, SMALL._replace(dtype="bfloat16"), {}),
    "mosaic_tpu": (mosaic_tpu, WIDE._replace(lengths=True), MOSAIC),
}
RARE_CASES = {
    "mosaic_tpu, every channel its own": (
        mosaic_tpu,
        WIDE._replace(widths=(256, 256), head=128, starts=True, logits=False),
        MOSAIC,
    ),
    "mosaic_tpu, its own blocks, heads that straddle registers": (
        mosaic_tpu,
        WIDE._replace(positions=72, chunk=8, widths=(384, 384), head=96),
        {"interpret": True},
    ),
    "mosaic_tpu, odd values: read apart": (
        mosaic_tpu,
        WIDE._replace(widths=(192, 96), head=32),
        MOSAIC,
    ),
    "mosaic_tpu, heads of whole registers": (
        mosaic_tpu,
        WIDE._replace(widths=(512, 256), head=128, lengths=True),
        MOSAIC,
    ),
    "mosaic_tpu, linked: read apart": (mosaic_tpu, WIDE, MOSAIC_LINKED),
    "mosaic_tpu, bfloat16": (mosaic_tpu, WIDE._replace(dtype="bfloat16"), MOSAIC),
}


@pytest.mark.parametrize(
    "name",
    slow_except(CASES, CASES | RARE_CASES, slow=["mosaic_tpu, linked: read apart"]),
)
def test_values_and_gradients_are_those_of_the_definition(name):
    backend, case, options = (CASES | RARE_CASES)[name]
    check(backend, case, **options)


@SLOW
def test_without_a_backward_pass_the_keys_are_written_at_ends_alone():
    call = WIDE._replace(lengths=True, dtype="bfloat16").call(**MOSAIC)
    both = [partial(mosaic_tpu.forward, residuals=needed) for needed in (True, False)]
    (want, states), (got, nothing) = (
        jax.jit(function, compiler_options=QUICK_COMPILE)(call) for function in both
    )
    assert nothing is None and states[1].shape[1] == WIDE.positions
    assert_values_close(got, want)
    # Two streams of all states, and one.
    assert [written_whole(function, call) for function in both] == [2, 1]


def written_whole(function, call, launched_by: str = "pallas_call") -> int:
    """Counts the kernel's results that are as large as the gate."""
    program = jax.make_jaxpr(function)(call)
    (launch,) = (e for e in program.eqns if e.primitive.name == launched_by)
    return [x.aval.size for x in launch.outvars].count(call.gate.logits.size)


@SLOW
def test_gradients_are_the_slopes_of_the_values():
    given = WIDE._replace(logits=False, starts=True, lengths=True)
    check_finite_difference(mosaic_tpu, given, **MOSAIC)


def test_the_op_is_the_scan_and_what_its_queries_read():
    gate, (v, k), initial, starts, _, queries = SMALL._replace(starts=True).inputs()
    C = SMALL.chunk

    @jax.jit
    def run(v, k, queries):
        rest = {"initial": initial, "starts": starts, "chunk": C}
        states, finals = gated_scan(gate, (v, k), **rest)
        got = queried_scan(gate, v, k, queries, **rest)
        want = (states[0], states[1][:, C - 1 :: C], key_logits(queries, states[1]))
        return got, api.QueriedScanOutputs(*want, finals)

    got, want = run(v, k, queries)
    assert_values_close(got, want)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_logits_are_products_with_the_tiled_queries(groups):
    draw = np.random.default_rng(groups).normal
    queries = jnp.asarray(draw(size=(2, 5, groups, 4)), "float32")
    keys = jnp.asarray(draw(size=(2, 5, 24)), "float32")

    def plain(queries, keys):
        tiled = jnp.tile(queries, (1, 1, 6 // groups, 1))
        return jnp.sum(tiled * keys.reshape(2, 5, 6, 4), axis=-1)

    logits, pull = jax.vjp(plain, queries, keys)
    assert_values_close(key_logits(queries, keys), logits)
    d = jnp.cos(logits)
    assert_values_close(jax.jit(pull_back)(queries, keys, d), pull(d))


def test_a_later_query_value_or_key_changes_nothing_before_it():
    gate, (v, k), _, _, _, queries = SMALL.inputs()
    run = jax.jit(partial(queried_scan, chunk=SMALL.chunk))
    before = run(gate, v, k, queries)
    later = [x.at[:, 7:].add(0.5) for x in (v, k, queries)]
    after = run(gate, *later)
    for x, y in ((before.values, after.values), (before.logits, after.logits)):
        np.testing.assert_array_equal(x[:, :7], y[:, :7])
        assert np.all(np.any(x[:, 7:] != y[:, 7:], axis=(0, 2)))
    np.testing.assert_array_equal(before.ends[:, 0], after.ends[:, 0])


def test_a_backend_that_cannot_is_refused_in_the_function_s_name():
    gate, (v, k), _, _, _, queries = SMALL.inputs()
    with pytest.raises(NotImplementedError, match="queried_scan: triton: needs an"):
        queried_scan(gate, v, k, queries, chunk=4, implementation="triton")
    half = SMALL.call()._replace(queries=queries.astype("float16"))
    for backend in (triton, mosaic_tpu):
        assert "got queries of float16" in backend.expressible(half)


def test_a_query_that_is_not_finite_spoils_its_own_head_alone():
    case = WIDE._replace(widths=(256, 128), head=128)
    call = case.call(**MOSAIC)
    assert call.queries is not None
    call = call._replace(queries=call.queries.at[0, 3, 0, 0].set(jnp.inf))
    run = partial(mosaic_tpu.forward, residuals=True)
    logits = jax.jit(run, compiler_options=QUICK_COMPILE)(call)[0].logits
    assert not jnp.isfinite(logits[0, 3]).any()  # Both heads read the one group.
    assert jnp.isfinite(logits.at[0, 3].set(0)).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"queries": jnp.zeros((2, 12, 3, 16))}, "N E the 32 channels of the keys"),
        ({"queries": jnp.zeros((2, 11, 2, 16))}, r"needs queries \[2, 12, N, E\]"),
        ({"queries": jnp.zeros((2, 12, 32))}, r"N, E\] .* got \(2, 12, 32\)"),
        ({"keys": jnp.zeros((2, 12, 24))}, "queried_scan: needs keys of shape"),
        ({"chunk": None}, "T must be a multiple of chunk=None"),
        ({"chunk": 5}, "T must be a multiple of chunk=5, got 12"),
        ({"chunk": 0}, "queried_scan: needs chunk of at least 1, got 0"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(change, message):
    gate, (v, k), _, _, _, queries = SMALL.inputs()
    call = {"gate": gate, "values": v, "keys": k, "queries": queries, "chunk": 4}
    unchecked = getattr(queried_scan, "__wrapped__", queried_scan)
    with pytest.raises(ValueError, match=message):
        unchecked(**call | change)
