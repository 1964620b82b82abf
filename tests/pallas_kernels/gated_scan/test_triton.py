"""The GPU kernels in interpret mode against the definition."""

import re

import pytest

from pallas_kernels.gated_scan import BlockSizes, triton
from pallas_kernels.gated_scan.triton_launch import choose_tiles
from tests.pallas_kernels.gated_scan.scan_cases import (
    Case,
    check,
    check_finite_difference,
)

BLOCKS = BlockSizes(stretch=4, channels=16, unroll=2)
WHOLE = BlockSizes(stretch=16, channels=8, unroll=4)
SLOW = pytest.mark.slow


@SLOW
def test_gradients_are_the_slopes_of_the_values():
    case = Case(positions=7, starts=True, lengths=True)
    check_finite_difference(triton, case, blocks=BLOCKS, interpret=True)


@SLOW
def test_one_program_can_run_a_whole_row_of_three_streams():
    case = Case(positions=13, chunk=5, widths=(48, 16, 16))
    check(triton, case, blocks=WHOLE, interpret=True)


def test_a_sequence_is_cut_where_batch_and_channels_do_not_fill_the_device():
    size = {"D": 2048, "width": 2048, "chunk": None}
    assert choose_tiles(B=64, T=4096, **size).positions == 4096
    assert choose_tiles(B=1, T=262144, **size).positions == 4096
    assert choose_tiles(B=1, T=262144, **size).linked


def test_chunks_are_programs_unless_they_are_few_and_long():
    size = {"B": 1, "T": 4096, "D": 2048, "width": 256}
    short = choose_tiles(**size, chunk=16)
    assert not short.linked and short.positions == 16
    assert choose_tiles(**size, chunk=2048).linked


def test_a_program_has_channels_of_one_head_and_as_many_as_registers_hold():
    size = {"B": 1, "T": 4096, "D": 2048, "chunk": 16}
    assert choose_tiles(**size, width=256).channels == 64
    assert choose_tiles(**size, width=128).channels == 32  # 16 tiles of each
    assert choose_tiles(**size, width=256, head=128).channels == 64
    assert choose_tiles(**size, width=512, head=96).channels == 32


@pytest.mark.parametrize(
    ("widths", "dtype", "message"),
    [
        ((40,), "float32", "multiple of 16, got 40"),
        ((64, 32, 16), "float32", "one other width, got 16 and .32."),
        ((512, 16), "float32", "tiles a stream 16 times at most, got 32"),
        ((64,), "float16", "computes in float32 and bfloat16, got gate of float16"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_a_reason(widths, dtype, message):
    call = Case(positions=3, widths=widths, dtype=dtype).call()
    assert re.search(message, str(triton.expressible(call)))
