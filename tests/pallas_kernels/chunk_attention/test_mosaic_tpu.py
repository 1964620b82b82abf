"""The TPU kernels in interpret mode against the definition."""

from functools import partial

import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chunk_attention import BlockSizes, mosaic_tpu
from tests.pallas_kernels.chunk_attention.cases import (
    Case,
    assert_is_the_definition,
    backend_passes,
    refusal,
)

BLOCKS = BlockSizes(block_q=16, block_k=4)
KERNELS = partial(backend_passes, mosaic_tpu, interpret=True, blocks=BLOCKS)


@pytest.mark.sweep
def test_the_tpu_s_own_semantics_find_no_race(capfd):
    interpret = pltpu.InterpretParams(detect_races=True)
    passes = partial(backend_passes, mosaic_tpu, interpret=interpret, blocks=BLOCKS)
    assert_is_the_definition(passes, Case(18, ends=5, first=(1, 0), batch=2))
    assert "RACE DETECTED" not in capfd.readouterr().out  # what it prints for one


def test_what_the_kernels_cannot_do_is_refused_with_a_reason():
    assert refusal(mosaic_tpu, Case(1)) is None
    wide = Case(1, width=264)
    assert "multiple of 8 up to 256, got 264" in str(refusal(mosaic_tpu, wide))
    half = Case(1, dtype="float16")
    assert "computes in float32 and bfloat16, got q of" in str(
        refusal(mosaic_tpu, half)
    )
