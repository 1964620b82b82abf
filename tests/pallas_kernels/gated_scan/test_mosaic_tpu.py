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
        (Case(positions=21, lengths=True, widths=(256, 128)), BLOCKS),
        (Case(positions=36, chunk=4, widths=(256, 128), head=64), CHUNKS),
    ],
    ids=["a sequence", "chunks that queries read"],
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


def test_what_the_kernels_cannot_do_is_refused_with_a_reason():
    wide = jax.eval_shape(Case(positions=3, widths=(65536,)).call)
    reason = mosaic_tpu.expressible(wide)
    assert "16 positions of 65536 channels do not fit into VMEM" in str(reason)
    half = Case(positions=3, dtype="float16").call()
    assert "got gate of float16" in str(mosaic_tpu.expressible(half))
