"""Block sizes of the op: given or refused; never another result."""

from functools import partial

import jax
import pytest

from pallas_kernels.chunk_attention import (
    BlockSizes,
    ChunkEnds,
    chunk_attention,
    mosaic_tpu,
    triton,
    xla,
)
from pallas_kernels.target import Target, as_if
from tests.compiling import QUICK_COMPILE
from tests.pallas_kernels.chunk_attention.cases import (
    Case,
    assert_is_the_definition,
    op_passes,
)
from tests.pallas_kernels.sized_programs import (
    GPU,
    HOPPER,
    TPU,
    assert_given_sizes_are_taken,
)
from tests.tolerances import assert_gradients_close

CPU = Target(platform="cpu", kind="cpu")
SIZES = {
    "triton": (GPU, {"block_q": 32, "backward_block_k": 16}),
    "mosaic_tpu": (TPU, {"block_q": 256, "block_k": 128}),
    "xla": (CPU, {"block_q": 128, "block_k": 64}),
}


def refusal(backend, case: Case, target: Target = GPU, **sizes: int) -> str | None:
    ask = backend.supported if backend is xla else backend.expressible
    with as_if(target):
        return ask(case.call(blocks=BlockSizes(**sizes)))


def test_tiles_that_a_caller_gives_are_the_definition():
    """So few ends are cut into bands otherwise."""
    sized = partial(chunk_attention, blocks=BlockSizes(block_q=8, block_k=4))
    assert_is_the_definition(partial(op_passes, sized), Case(37, groups=1))


def test_the_passes_may_be_cut_differently():
    """What is kept between them is laid out alike: sizes may differ."""
    case = Case(21, batch=1, heads=2)
    sizes = [
        BlockSizes(block_q=16, block_k=8, backward_block_q=8, backward_block_k=8),
        BlockSizes(block_q=8, block_k=4, backward_block_q=16, backward_block_k=4),
    ]

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(calls, do):
        saved = triton.forward(calls[0], residuals=True)
        gradients = [triton.backward(call, saved, do) for call in calls]
        return [jax.tree.leaves(of_call) for of_call in gradients]

    calls = [case.call(interpret=True, blocks=size) for size in sizes]
    same, other = run(calls, case.weights())
    assert_gradients_close(other, same)


@pytest.mark.parametrize("backend", SIZES)
def test_given_sizes_are_taken(backend):
    target, sizes = SIZES[backend]
    case = Case(1000, batch=1, width=32, chunk=1)
    call = case.call()

    def run(q, own_logits, own_values, *ends, **given):
        options = {**case.options, "implementation": backend, **given}
        return chunk_attention(q, own_logits, own_values, ChunkEnds(*ends), **options)

    assert_given_sizes_are_taken(
        run, (*call[:3], call.ends.keys, call.ends.values), target, BlockSizes(**sizes)
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_q": 8}, "block_q must be a power of two from 16, got 8"),
        ({"backward_block_k": 48}, "backward_block_k must be a power of two from 16"),
        ({"warps": 6}, "warps must be a power of two from 1 to 32, got 6"),
        ({"splits": 3}, "splits must divide the 2 heads of a query group, got 3"),
        (
            {"block_q": 128, "block_k": 128, "stages": 3},
            "block_q=128, block_k=128 and stages=3 need 196,608 bytes of shared "
            "memory, the device has 101,376",
        ),
        (
            {"backward_block_k": 256, "backward_block_q": 64},
            "backward_block_k=256, backward_block_q=64 and stages=2 need 163,840 bytes",
        ),
        ({"block_q": 128, "block_k": 64, "stages": 2, "warps": 4}, None),
    ],
)
def test_sizes_that_a_gpu_cannot_have_are_refused_with_the_numbers(sizes, message):
    case = Case(300, width=128, dtype="bfloat16")
    reason = refusal(triton, case, **sizes)
    assert reason is None if message is None else str(reason).startswith(message)


def test_hopper_s_matrix_unit_reads_one_block_more_from_shared_memory():
    case = Case(300, width=128, dtype="bfloat16")
    sizes = {"block_q": 128, "block_k": 64, "stages": 5}
    assert refusal(triton, case, HOPPER, **sizes) is None
    sizes["stages"] = 6
    message = "stages=6 need 262,144 bytes of shared memory, the device has 232,448"
    assert message in str(refusal(triton, case, HOPPER, **sizes))


def test_sizes_that_a_tpu_cannot_have_are_refused_with_the_numbers():
    case = Case(1000, batch=1, width=128, chunk=1)
    assert refusal(mosaic_tpu, case, TPU, block_q=256, block_k=1000) is None
    message = "block_q must be a multiple of 128, or positions of the call, got 200 of"
    assert message in str(refusal(mosaic_tpu, case, TPU, block_q=200))
    long = Case(8192, batch=1, heads=1, groups=1, width=128, chunk=1)
    message = refusal(mosaic_tpu, long, TPU, block_q=4096, block_k=2048)
    assert str(message).startswith(
        "block_q=4096 and block_k=2048 need 165,675,008 bytes"
    )


def test_sizes_that_a_backend_has_no_use_for_are_refused():
    message = "takes of the block sizes only block_q and block_k, got warps=4"
    assert refusal(mosaic_tpu, Case(37), TPU, warps=4) == message
    assert refusal(xla, Case(37), CPU, warps=4) == message
    message = "takes of the block sizes none, got block_q=64"
    assert refusal(xla, Case(37), GPU, block_q=64) == message
    with pytest.raises(NotImplementedError, match="triton: .*; xla: takes of the"):
        op_passes(
            chunk_attention, Case(37), Case(37).inputs()[0], blocks=BlockSizes(warps=4)
        )
