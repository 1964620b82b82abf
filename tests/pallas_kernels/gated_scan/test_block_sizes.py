"""Block sizes of the op: given or refused; never another result."""

import pytest

from pallas_kernels.gated_scan import (
    BlockSizes,
    gated_scan,
    mosaic_tpu,
    queried_scan,
    triton,
    xla,
)
from pallas_kernels.target import as_if
from tests.pallas_kernels.gated_scan.scan_cases import Case
from tests.pallas_kernels.sized_programs import (
    GPU,
    TPU,
    assert_given_sizes_are_taken,
)

RAT = Case(64, chunk=16, widths=(256, 128), head=128, logits=True)
RNN = Case(300, widths=(128,), batch=1)
SIZES = {
    "mosaic_tpu": (RAT, TPU, BlockSizes(stretch=4)),
    "xla in blocks": (RNN, GPU, BlockSizes(stretch=64)),
}


def refusal(backend, case: Case, target=GPU, **sizes: int) -> str | None:
    ask = backend.supported if backend is xla else backend.expressible
    with as_if(target):
        return ask(case.call(blocks=BlockSizes(**sizes)))


@pytest.mark.parametrize("name", SIZES)
def test_given_sizes_are_taken(name):
    case, target, blocks = SIZES[name]
    backend = name.split()[0]
    gate, values, _, _, _, queries = case.inputs()

    def run(gate, values, queries, **given):
        options = {"chunk": case.chunk, "implementation": backend, **given}
        if queries is None:
            return gated_scan(gate, values, **options)
        return queried_scan(gate, *values, queries, **options)

    assert_given_sizes_are_taken(run, (gate, values, queries), target, blocks)


def test_given_sizes_go_before_the_heuristic_s_on_a_gpu():
    sizes = BlockSizes(stretch=40, channels=32, unroll=3)
    for backward in (False, True):
        launch = triton.Launch.of(RNN.call(blocks=sizes), backward=backward)
        assert (launch.stretch, launch.channels, launch.unroll) == (40, 32, 3)
        assert launch.linked
    chunks = triton.Launch.of(RAT.call(blocks=BlockSizes(stretch=16)), backward=False)
    assert not chunks.linked


@pytest.mark.parametrize(
    ("case", "sizes", "message"),
    [
        (RNN, {"channels": 256}, "channels must be a power of two from 1 to 128, got"),
        # Heads of 96 channels in a stream of 192: 32 divides both.
        (
            Case(30, chunk=15, widths=(384, 192), head=96),
            {"channels": 64},
            "channels must be a power of two from 1 to 32, got 64",
        ),
        (RAT, {"unroll": 32}, "unroll must be at most the 16 positions of a stretch"),
        (RAT, {"stretch": 32, "unroll": 32, "channels": 128}, None),
    ],
)
def test_sizes_that_a_gpu_cannot_have_are_refused_with_the_numbers(
    case, sizes, message
):
    reason = refusal(triton, case, **sizes)
    assert reason is None if message is None else str(reason).startswith(message)


def test_sizes_that_a_tpu_cannot_have_are_refused_with_the_numbers():
    assert refusal(mosaic_tpu, RAT, TPU, stretch=64) is None
    assert refusal(mosaic_tpu, RAT, TPU, stretch=5) == "stretch must be even, got 5"
    message = "8 stretches of 512 positions need 100,663,296 bytes of VMEM, kernels may"
    assert message in str(refusal(mosaic_tpu, RAT, TPU, stretch=512))


def test_sizes_that_a_backend_has_no_use_for_are_refused():
    message = "takes of the block sizes only stretch, got channels=32"
    assert refusal(mosaic_tpu, RAT, TPU, channels=32) == message
    assert refusal(xla, RNN, GPU, channels=32) == message
    # Chunks are loops of their own length.
    message = "takes of the block sizes none, got stretch=32"
    assert refusal(xla, RAT, GPU, stretch=32) == message
    gate, values, *_ = RNN.inputs()
    with pytest.raises(NotImplementedError, match="gated_scan: .*; xla: takes of the"):
        gated_scan(gate, values, blocks=BlockSizes(stretch=32))
