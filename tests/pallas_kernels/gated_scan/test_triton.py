"""How the GPU backend cuts calls and what it refuses; for values: the torch lane."""

import re

import jax
import pytest

from pallas_kernels.gated_scan import triton
from pallas_kernels.gated_scan.call import GatedScanCall, GatedScanOptions
from pallas_kernels.gated_scan.triton import Launch
from pallas_kernels.gated_scan.triton_sizes import SHORTEST_STRETCH
from tests.pallas_kernels.gated_scan.scan_cases import Case


def launch(*, B, T, width=2048, chunk=None, head=0, backward=False) -> Launch:
    """Returns the cut of 2048 channels with a stream of `width`."""
    gate, narrow = (jax.ShapeDtypeStruct((B, T, D), "bfloat16") for D in (2048, width))
    queries = None
    if head:
        queries = jax.ShapeDtypeStruct((B, T, width // head, head), "bfloat16")
    options = GatedScanOptions(chunk=chunk)
    call = GatedScanCall(gate, (gate, narrow), (), None, None, queries, options)
    return Launch.of(call, backward=backward)


def test_a_sequence_is_cut_where_batch_and_channels_do_not_fill_the_device():
    uncut = launch(B=32, T=4096)
    assert uncut.stretch == 4096 and not uncut.linked
    cut = launch(B=1, T=262144)
    assert cut.linked and cut.stretches == 66  # 2112 warps
    assert launch(B=1, T=1024).stretch == SHORTEST_STRETCH


def test_chunks_are_programs_unless_they_are_few_and_long():
    size = {"B": 1, "T": 4096, "width": 256}
    short = launch(**size, chunk=16)
    assert not short.linked and short.stretch == 16
    assert launch(**size, chunk=2048).linked
    # One chunk is a row: queries read its states in the kernel.
    assert not launch(B=8, T=64, width=256, chunk=64, head=128).linked


def test_a_program_has_channels_of_one_head_and_as_many_as_registers_hold():
    size = {"B": 1, "T": 4096, "chunk": 16}
    assert launch(**size, width=256).channels == 64
    assert launch(**size, width=256, backward=True).channels == 32
    assert launch(**size, width=128).channels == 32  # 16 tiles of each
    assert launch(**size, width=256, head=128).channels == 64
    assert launch(**size, width=512, head=32).channels == 32


def test_a_stretch_s_elements_are_counted_in_32_bits():
    long = launch(B=64, T=2**19)
    assert long.stretches == 2 and long.stretch * 2048 == 2**29


@pytest.mark.parametrize(
    ("widths", "dtype", "message"),
    [
        ((64, 64, 64), "float32", "scans one or two streams, got 3"),
        ((40,), "float32", "multiple of 16, got 40"),
        ((512, 16), "float32", "tiles a stream 16 times at most, got 32"),
        ((64,), "float16", "computes in float32 and bfloat16, got gate of float16"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_a_reason(widths, dtype, message):
    call = Case(positions=3, widths=widths, dtype=dtype).call()
    assert re.search(message, str(triton.expressible(call)))
