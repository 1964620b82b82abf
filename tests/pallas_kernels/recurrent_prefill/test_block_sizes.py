"""Block sizes of the op: given or refused; never another result."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_prefill import (
    BlockSizes,
    empty_cache,
    recurrent_prefill,
)
from pallas_kernels.recurrent_prefill.mosaic_tpu import backend as mosaic_tpu
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import (
    LayerSizes,
    forward_bytes,
)
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import choose_tiles as tpu_tiles
from pallas_kernels.recurrent_prefill.triton import backend as triton
from pallas_kernels.recurrent_prefill.triton.launch import (
    choose_tiles,
)
from pallas_kernels.recurrent_prefill.xla.backend import Tiling
from pallas_kernels.target import LEAST_VMEM, Target, as_if
from tests.pallas_kernels.recurrent_prefill.layer_cases import (
    Case,
    quick_jit,
    reference_values,
    refusal,
)
from tests.tolerances import assert_values_close

CASE = Case(positions=37, batch=3)
TPU_LAYER = Case(positions=5, head_width=64, width=128, inner=256, dtype="bfloat16")
SMALL_GPU = Target(platform="gpu", kind="an A10", compute_capability="8.6")


def xla_tiling(case: Case = CASE, **options) -> Tiling:
    return Tiling.of(case.call(*case.inputs()[:2], **options))


# What kernels compute with given sizes every test of theirs checks: `interpreted` gives
# them small ones.
def test_given_sizes_change_no_result_of_xla():
    x, weights, _ = CASE.inputs()
    cache = empty_cache(1, CASE.batch, 0, CASE.width, CASE.spec)

    def run(x, weights, **options):
        return recurrent_prefill(x, weights, cache, spec=CASE.spec, **options)[0]

    blocks = BlockSizes(keys=16)
    got = quick_jit(lambda x, w: run(x, w, tile=16, blocks=blocks))(x, weights)
    assert_values_close(got, reference_values(CASE))
    assert xla_tiling(tile=16, blocks=blocks).geometry.chunk == 16
    assert xla_tiling(tile=16).geometry.chunk == 48  # All slots.


def test_the_heuristic_fills_what_is_not_given():
    sizes = {"batch": 512, "tile": None, "spec": CASE.spec, "shared": 232_448}
    sizes["direction"] = "forward"
    free = choose_tiles(**sizes)
    given = choose_tiles(**sizes, blocks=BlockSizes(columns=64, rows=64))
    assert given == dataclasses.replace(free, columns=64, rows=64, depth=32)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": 8}, "rows must be a power of two from 16, got 8"),
        ({"depth": 48}, "depth must be a power of two from 16, got 48"),
        ({"sub_tile": 128}, "sub_tile must be a power of two from 16 to tile=16, got"),
        ({"attend_rows": 3}, "attend_rows must be a power of two from 1, got 3"),
        ({"attend_rows": 32, "rows": 16}, "attend_rows must be at most rows=16, got"),
        (
            {"rows": 128, "columns": 128, "depth": 64},
            "columns=128 and depth=64 need 196,608 bytes of shared memory, the device "
            "has 101,376",
        ),
    ],
)
def test_sizes_that_a_gpu_cannot_have_are_refused_with_the_numbers(sizes, message):
    with as_if(SMALL_GPU):
        assert message in str(refusal(triton, CASE, blocks=BlockSizes(**sizes)))


def test_a_tpu_s_rows_are_the_caller_s_or_refused():
    sizes = LayerSizes.of(*TPU_LAYER.inputs()[:2], TPU_LAYER.spec)
    choose_rows = partial(tpu_tiles, sizes, None, LEAST_VMEM, forward_bytes)
    assert choose_rows(64).rows == 64 != choose_rows(None).rows
    assert refusal(mosaic_tpu, TPU_LAYER, blocks=BlockSizes(rows=64)) is None
    message = "runs 128, 64, 32, 16, 8 rows per program, got rows=48"
    assert refusal(mosaic_tpu, TPU_LAYER, blocks=BlockSizes(rows=48)) == message


def test_a_backend_refuses_sizes_that_it_has_no_use_for():
    depth = BlockSizes(depth=32)
    message = "takes of the block sizes only rows, got depth=32"
    assert refusal(mosaic_tpu, TPU_LAYER, blocks=depth) == message
    x, weights, _ = CASE.inputs()
    message = "mosaic_tpu: .*; xla: takes of the block sizes only keys, got depth=32"
    with pytest.raises(NotImplementedError, match=message):
        recurrent_prefill(
            *(x, weights, empty_cache(1, CASE.batch, 0, CASE.width, CASE.spec)),
            spec=CASE.spec,
            blocks=depth,
        )
    with pytest.raises(ValueError, match="BlockSizes: keys must be at least 1, got 0"):
        BlockSizes(keys=jnp.int32(0).item())
