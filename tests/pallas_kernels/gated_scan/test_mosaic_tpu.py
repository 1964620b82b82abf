"""The TPU kernels in interpret mode against the definition."""

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_scan import BlockSizes, mosaic_tpu
from pallas_kernels.gated_scan.mosaic_launch import Tiles, choose_tiles
from tests.pallas_kernels.gated_scan.scan_cases import (
    Case,
    check,
    check_finite_difference,
)

CHUNKS = BlockSizes(stretch=4)
BLOCKS = BlockSizes(stretch=2)
SLOW = pytest.mark.slow


@SLOW
def test_gradients_are_the_slopes_of_the_values():
    case = Case(positions=21, starts=True, lengths=True, widths=(256, 128))
    check_finite_difference(mosaic_tpu, case, blocks=BLOCKS, interpret=True)


@SLOW
@pytest.mark.parametrize(
    "case, blocks",
    [
        pytest.param(
            Case(positions=21, lengths=True, widths=(256, 128)),
            BLOCKS,
            id="a sequence",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            Case(positions=36, chunk=4, widths=(256, 128), head=64),
            CHUNKS,
            id="chunks that queries read",
        ),
    ],
)
def test_the_tpu_s_own_semantics_find_no_race(case, blocks):
    interpret = pltpu.InterpretParams(detect_races=True)
    check(mosaic_tpu, case, blocks=blocks, interpret=interpret)


def test_chunks_are_stretches_where_a_block_of_them_fits():
    size = {"T": 4096, "streams": 2}
    assert choose_tiles(**size, D=2048, chunk=16) == Tiles(stretch=16, linked=False)
    assert choose_tiles(**size, D=2048, chunk=64).linked
    assert choose_tiles(**size, D=2048, chunk=15).linked  # rows of full registers
    assert choose_tiles(**size, D=16384, chunk=None).stretch == 2


@pytest.mark.parametrize(
    "widths, chunk, head, fused",
    [
        ((256, 128), 16, 64, 64),
        ((256, 128), 16, 0, 0),
        ((256, 128), None, 64, 0),  # Linked stretches: their ends are no chunks'.
        ((192, 128), 16, 64, 0),  # The gate's lanes do not fill registers.
        ((256, 64), 16, 64, 0),
        ((256, 128), 16, 1, 0),  # More heads than a register has lanes.
    ],
)
def test_kernels_read_for_queries_where_heads_are_lanes_of_one_register(
    widths, chunk, head, fused
):
    case = Case(positions=32, widths=widths, chunk=chunk, head=head)
    call = case.call()
    tiles = choose_tiles(T=32, D=256, streams=1, chunk=chunk, blocks=BlockSizes())
    assert tiles.linked == (chunk is None)
    assert mosaic_tpu._head_read(call, tiles) == fused


def test_what_the_kernels_cannot_do_is_refused_with_a_reason():
    wide = jax.eval_shape(Case(positions=3, widths=(65536,)).call)
    reason = mosaic_tpu.expressible(wide)
    assert "16 positions of 65536 channels do not fit into VMEM" in str(reason)
    half = Case(positions=3, dtype="float16").call()
    assert "got gate of float16" in str(mosaic_tpu.expressible(half))
