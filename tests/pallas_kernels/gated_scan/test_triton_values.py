"""What the GPU kernels compute, by Triton's interpreter on a CPU: the torch lane."""

from functools import partial

import jax
import pytest

from pallas_kernels.gated_scan import BlockSizes, triton
from tests.compiling import QUICK_COMPILE
from tests.marks import slow_except
from tests.pallas_kernels.gated_scan.scan_cases import (
    Case,
    check,
    check_finite_difference,
)
from tests.pallas_kernels.gated_scan.test_gated_scan import TestLaws as Laws
from tests.pallas_kernels.gated_scan.test_queried_scan import written_whole
from tests.tolerances import assert_gradients_close, assert_values_close

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("interpreted_launches")]
SLOW = pytest.mark.slow
ROW = Case(37, widths=(32, 16), logits=True)
RAT = Case(64, chunk=8, widths=(128, 32), head=32, logits=True)
SMALL = Case(12, chunk=4, widths=(64, 32), head=16, logits=True)
# Stretches that are linked, the last of them and their turns not full.
LINKED = BlockSizes(stretch=9, channels=16, unroll=2)
CASES = {
    "one position": (Case(1, widths=(16,)), {}),
    "a row": (ROW, {}),
    "a row of one stream": (ROW._replace(widths=(32,), logits=False), {}),
    "linked": (ROW._replace(starts=True, lengths=True), LINKED),
    "chunks": (Case(65, chunk=16, widths=(64, 16), starts=True, lengths=True), {}),
    "queries": (RAT, {}),
}
SLOW_CASES = {
    "one position of a chunk": (Case(1, chunk=4, logits=True, lengths=True), {}),
    "64 positions": (ROW._replace(positions=64, starts=True), {}),
    "65 positions, linked": (ROW._replace(positions=65, dtype="bfloat16"), LINKED),
    "1,000 positions": (
        Case(1000, widths=(32,), batch=1, starts=True, logits=True),
        BlockSizes(stretch=300),
    ),
    "1,000 positions in chunks": (
        Case(1000, chunk=300, widths=(32,), batch=1, lengths=True, dtype="bfloat16"),
        {},
    ),
    "bfloat16": (ROW._replace(starts=True, lengths=True, dtype="bfloat16"), {}),
    "chunks, bfloat16": (ROW._replace(chunk=4, dtype="bfloat16"), {}),
    "chunks within linked stretches": (ROW._replace(chunk=5, lengths=True), LINKED),
    # A row ends at the position after a stretch that is not full turns.
    "linked, gates": (ROW._replace(positions=20, logits=False, lengths=True), LINKED),
    "linked, one stream": (ROW._replace(widths=(32,), starts=True), LINKED),
    "rows of 70 sequences": (ROW._replace(positions=5, batch=70), {}),
    "six tiles, not a power of two": (SMALL._replace(widths=(96, 16), starts=True), {}),
    "three tiles, linked": (Case(23, widths=(48, 16), starts=True), LINKED),
    "narrow values": (SMALL._replace(widths=(16, 64), lengths=True), {}),
    "every channel its own": (
        SMALL._replace(widths=(64, 64), head=32, logits=False, starts=True),
        {},
    ),
    "turns that are no chunk": (
        SMALL._replace(positions=15, chunk=5, widths=(128, 32), head=32, lengths=True),
        BlockSizes(unroll=2),
    ),
    "heads of several programs": (
        SMALL._replace(widths=(256, 128), head=128),
        BlockSizes(channels=32),
    ),
    "chunks of one": (SMALL._replace(positions=6, chunk=1), BlockSizes(unroll=1)),
    "queries, bfloat16": (SMALL._replace(dtype="bfloat16", starts=True), {}),
    "read apart: values narrower than heads": (
        SMALL._replace(widths=(16, 64), head=32),
        {},
    ),
    "queries of one chunk": (SMALL._replace(chunk=12), {}),
    "read apart: linked": (SMALL, BlockSizes(stretch=6, unroll=2)),
    "read apart: heads of 8": (SMALL._replace(head=8), {}),
}

RARE = {
    *("1,000 positions", "1,000 positions in chunks", "bfloat16", "chunks, bfloat16"),
    *("64 positions", "one position of a chunk", "rows of 70 sequences"),
}
"""A sweep, because other cases join each with something else."""


@pytest.mark.parametrize(
    "name", slow_except(CASES, CASES | SLOW_CASES, slow=SLOW_CASES.keys() - RARE)
)
def test_values_and_gradients_are_those_of_the_reference(name):
    case, blocks = (CASES | SLOW_CASES)[name]
    check(triton, case, blocks=blocks or BlockSizes())


@SLOW
@pytest.mark.parametrize("case", [ROW, SMALL], ids=["a row", "queries"])
def test_gradients_are_the_slopes_of_the_values(case):
    case = case._replace(positions=8, logits=False, starts=True, lengths=True)
    check_finite_difference(triton, case, blocks=BlockSizes(channels=16))


@SLOW
def test_the_passes_may_be_cut_differently():
    """What is kept between them is laid out alike: sizes may differ."""
    case = Case(12, chunk=4, batch=1, widths=(32, 16), head=16, logits=True)
    # Chunks whose queries the kernel reads; stretches that are no chunks, read apart.
    sizes = [BlockSizes(stretch=4, unroll=1), BlockSizes(stretch=6, unroll=2)]

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(calls, cotangents):
        _, states = triton.forward(calls[0], residuals=True)
        gradients = [triton.backward(call, states, cotangents) for call in calls]
        return [jax.tree.leaves(of_call) for of_call in gradients]

    calls = [case.call(blocks=size) for size in sizes]
    same, other = run(calls, case.cotangents())
    assert_gradients_close(other, same)


@SLOW
def test_without_a_backward_pass_the_keys_are_written_at_ends_alone():
    case = SMALL._replace(lengths=True, starts=True)
    both = [partial(triton.forward, residuals=needed) for needed in (True, False)]
    (want, states), (got, nothing) = (
        jax.jit(function, compiler_options=QUICK_COMPILE)(case.call())
        for function in both
    )
    assert nothing is None and states[1].shape[1] == case.positions
    assert_values_close(got, want)
    # Two streams of all states, and one.
    whole = [written_whole(one, case.call(), "pure_callback") for one in both]
    assert whole == [2, 1]


class Kernels(Laws):
    __test__ = False
    backends = {"triton": (triton, {"blocks": BlockSizes(stretch=5, unroll=2)})}


LAWS = Kernels()


@SLOW
def test_the_state_carries_over_a_cut():
    LAWS.test_any_cut_with_the_state_carried_over_changes_nothing("triton")


@SLOW
def test_the_future_does_not_leak_into_the_past():
    LAWS.test_the_future_does_not_leak_into_the_past("triton")


@SLOW
def test_rows_do_not_mix():
    LAWS.test_rows_do_not_mix("triton")
