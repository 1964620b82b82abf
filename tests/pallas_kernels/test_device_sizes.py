"""Values and gradients at the block sizes that the heuristics choose for a device.

Other tests interpret kernels in small blocks. The kernels of Triton's language have
such cases in `test_triton_values.py` of each op, and XLA always runs as it is.
"""

from functools import partial

import pytest

from pallas_kernels.chunk_attention import mosaic_tpu as attention_tpu
from pallas_kernels.chunk_attention import triton as attention_gpu
from pallas_kernels.chunk_attention.mosaic_launch import choose_tiles as tpu_tiles
from pallas_kernels.chunk_attention.triton_launch import choose_tiles as gpu_tiles
from pallas_kernels.gated_scan import mosaic_tpu as scan_tpu
from pallas_kernels.gated_scan.mosaic_launch import choose_tiles as scan_tiles
from pallas_kernels.recurrent_prefill.call import BlockSizes
from pallas_kernels.recurrent_prefill.mosaic_tpu import backend as prefill_tpu
from pallas_kernels.recurrent_prefill.triton import backend as prefill_gpu
from pallas_kernels.recurrent_prefill.triton.launch import Launch, choose_tiles
from pallas_kernels.selective_scan import mosaic_tpu as selective_tpu
from pallas_kernels.target import shared_memory_bytes
from tests.pallas_kernels.chunk_attention import cases as attention_cases
from tests.pallas_kernels.gated_scan import scan_cases
from tests.pallas_kernels.recurrent_prefill import layer_cases
from tests.pallas_kernels.selective_scan.test_selective_scan import TestLaws as Laws
from tests.tolerances import assert_gradients_close, assert_values_close

pytestmark = pytest.mark.slow
LAYER = layer_cases.Case(
    positions=18, batch=70, width=128, heads=2, head_width=64, inner=512
)
"""Rows that do not fill their block, a second sub-tile that is not full either."""


def test_products_of_a_recurrent_layer_on_a_gpu_are_split():
    sizes = {"batch": LAYER.batch, "tile": None, "spec": LAYER.spec}
    shared = shared_memory_bytes()
    tiles = choose_tiles(**sizes, shared=shared, direction="forward")
    assert (tiles.tile, tiles.rows, tiles.columns, tiles.splits) == (64, 128, 128, 8)
    launch = Launch(spec=LAYER.spec, tiles=tiles, shared=shared)
    assert launch.split(LAYER.width, LAYER.inner, 1)[1] > 1


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(prefill_gpu, id="gpu", marks=pytest.mark.sweep),
        pytest.param(prefill_tpu, id="tpu"),
    ],
)
def test_a_recurrent_layer_is_the_reference_s(backend):
    options = {"interpret": True, "blocks": BlockSizes(), "tile": None}
    run = layer_cases.both_passes(backend, LAYER, **options)
    got = layer_cases.quick_jit(run)(*LAYER.inputs())
    want = layer_cases.reference(LAYER)
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])


def test_chunk_attention_on_a_gpu_is_the_definition():
    case = attention_cases.Case(150, width=64)
    sizes = {"batch": 2, "length": 150, "heads": 4, "groups": 2, "width": 64}
    tiles = gpu_tiles(**sizes, wide=True)
    assert (tiles.block_q, tiles.block_k, tiles.splits) == (64, 32, 2)
    passes = partial(attention_cases.backend_passes, attention_gpu, interpret=True)
    attention_cases.assert_is_the_definition(passes, case)


def test_chunk_attention_on_a_tpu_is_the_definition():
    case = attention_cases.Case(600, chunk=1, width=64, batch=1, heads=2)
    tiles = tpu_tiles(length=600, ends=600)
    assert (tiles.block_q, tiles.block_k) == (512, 512)
    passes = partial(attention_cases.backend_passes, attention_tpu, interpret=True)
    attention_cases.assert_is_the_definition(passes, case)


@pytest.mark.parametrize(
    "case",
    [
        scan_cases.Case(300, widths=(256, 128), starts=True, lengths=True, logits=True),
        scan_cases.Case(304, chunk=16, widths=(256, 128), head=64, logits=True),
    ],
    ids=["a sequence", "chunks that queries read"],
)
def test_a_gated_scan_on_a_tpu_is_the_definition(case):
    tiles = scan_tiles(T=case.positions, D=256, streams=2, chunk=case.chunk)
    assert tiles.stretch == (case.chunk or 32)
    scan_cases.check(scan_tpu, case, interpret=True)


def test_a_selective_scan_on_a_tpu_is_the_definition():
    laws = Laws()
    laws.backends = {"mosaic_tpu": (selective_tpu, {"interpret": True})}
    assert selective_tpu.choose_tiles(channels=512, chunk=16).channels == 512
    call = laws.call(150, starts=True, chunk=16, channels=512)
    got, want = laws.both_passes(call, "mosaic_tpu"), laws.both_passes(call, None)
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])
