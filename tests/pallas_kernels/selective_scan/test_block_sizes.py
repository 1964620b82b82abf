"""Block sizes of the op: given or refused; never another result."""

import pytest

from pallas_kernels.selective_scan import (
    BlockSizes,
    mosaic_tpu,
    selective_scan,
    triton,
    xla,
)
from pallas_kernels.target import Target, as_if
from tests.pallas_kernels.selective_scan.test_selective_scan import LAWS, op_call
from tests.pallas_kernels.sized_programs import (
    GPU,
    TPU,
    assert_given_sizes_are_taken,
)
from tests.tolerances import assert_gradients_close, assert_values_close

CPU = Target(platform="cpu", kind="cpu")
SIZES = {
    "mosaic_tpu": (TPU, BlockSizes(channels=128, unroll=2)),
    "xla": (CPU, BlockSizes(unroll=4)),
}


def refusal(backend, target=GPU, *, of: int = 384, **sizes: int) -> str | None:
    """Returns a backend's reason against a call of `of` channels."""
    call = op_call(LAWS.call(3, channels=of), blocks=BlockSizes(**sizes))
    ask = backend.supported if backend is xla else backend.expressible
    with as_if(target):
        return ask(call)


@pytest.mark.parametrize("backend", SIZES)
def test_given_sizes_are_taken(backend):
    target, blocks = SIZES[backend]
    call = LAWS.call(37, channels=384)
    chunk = call.rest["chunk"]

    def run(arrays, **given):
        options = {"chunk": chunk, "implementation": backend, **given}
        return selective_scan(**arrays, **options)

    assert_given_sizes_are_taken(run, (call.arrays,), target, blocks)


def test_given_sizes_go_before_the_heuristic_s_on_a_gpu():
    blocks = BlockSizes(channels=16, backward_unroll=4, stretch=9)
    call = op_call(LAWS.call(37, channels=384), blocks=blocks)
    forward, backward = (triton.Launch.of(call, backward=b) for b in (False, True))
    assert (forward.channels, forward.unroll, forward.stretch) == (16, 2, 16)
    assert (backward.channels, backward.unroll, backward.stretch) == (64, 4, 16)


def test_given_turns_of_a_loop_change_no_result_of_xla():
    call = LAWS.call(13, starts=True)
    want = LAWS.both_passes(call, "xla")
    rest = call.rest | {"blocks": BlockSizes(unroll=3)}
    got = LAWS.both_passes(call._replace(rest=rest), "xla")
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"channels": 48}, "channels must be a power of two from 1 to 128, got 48"),
        ({"backward_channels": 256}, "backward_channels must be a power of two from"),
        ({"unroll": 3}, "unroll must divide chunk=8, got 3"),
        ({"backward_unroll": 16}, "backward_unroll must divide chunk=8, got 16"),
        ({"channels": 64, "unroll": 8, "stretch": 16}, None),
    ],
)
def test_sizes_that_a_gpu_cannot_have_are_refused_with_the_numbers(sizes, message):
    reason = refusal(triton, **sizes)
    assert reason is None if message is None else str(reason).startswith(message)


def test_sizes_that_a_tpu_cannot_have_are_refused_with_the_numbers():
    assert refusal(mosaic_tpu, TPU, channels=384, unroll=4) is None
    reason = refusal(mosaic_tpu, TPU, channels=192)
    assert reason == "channels must be a multiple of 128 that divides 384, got 192"
    reason = refusal(mosaic_tpu, TPU, of=8192, channels=8192)
    assert str(reason).startswith(
        "channels=8192 need 98,566,144 bytes of VMEM, kernels"
    )
    assert refusal(mosaic_tpu, TPU, unroll=3) == "unroll must divide chunk=8, got 3"


def test_sizes_that_a_backend_has_no_use_for_are_refused():
    message = "takes of the block sizes only channels and unroll, got stretch=4"
    assert refusal(mosaic_tpu, TPU, stretch=4) == message
    message = "takes of the block sizes only unroll, got stretch=4"
    assert refusal(xla, CPU, stretch=4) == message
    call = LAWS.call(7)
    with pytest.raises(NotImplementedError, match="triton: .*; xla: takes of the"):
        selective_scan(**call.arrays, blocks=BlockSizes(stretch=4))
