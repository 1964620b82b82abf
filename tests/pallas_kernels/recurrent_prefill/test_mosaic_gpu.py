"""The Hopper kernel in jax's interpreter of Mosaic GPU against the reference.

One instance plays all programs there: what they own, exchange and add up is tested, how
they wait for one another is not. `test_compiles.py` compiles that.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_prefill import recurrent_prefill
from pallas_kernels.recurrent_prefill.arrays import Rows, empty_cache
from pallas_kernels.recurrent_prefill.mosaic_gpu import backend as mosaic_gpu
from pallas_kernels.recurrent_prefill.mosaic_gpu.launch import (
    LayerWidths,
    choose_programs,
    refusal_of_widths,
    share_out,
    shared_bytes,
)
from pallas_kernels.target import Target, as_if
from tests.pallas_kernels.recurrent_prefill.layer_cases import (
    FOUR_PROGRAMS,
    Case,
    reference,
    reference_values,
    refusal,
    values,
    values_and_gradients,
)
from tests.tolerances import assert_gradients_close, assert_values_close

PLAIN = FOUR_PROGRAMS
PAPER = LayerWidths(1024, 1024, 4096)
SHARED = 232_448
H100 = Target(
    platform="gpu",
    kind="NVIDIA H100 80GB HBM3",
    compute_capability="9.0",
    multiprocessors=132,
)


def check_values(case: Case) -> None:
    assert_values_close(values(mosaic_gpu, case), reference_values(case), case.dtype)


# Past a tile of 16 positions the second one meets the first through the prefix.
@pytest.mark.parametrize(
    "positions", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16, 19))]
)
def test_the_kernel_computes_what_the_reference_does(positions):
    check_values(PLAIN._replace(positions=positions))


# Three blocks of 64 rows: more of them and heads than programs, and more blocks of
# activations than the ring holds.
@pytest.mark.slow
def test_more_rows_than_programs_are_the_reference_s():
    check_values(PLAIN._replace(positions=2, batch=130))


# 64 programs: products are split 8, 2, 8 and 4 times, as at the paper's width.
@pytest.mark.sweep
def test_the_splits_of_the_papers_width_are_the_reference_s():
    widths = {"heads": 8, "key_heads": 8, "width": 512, "inner": 2048}
    check_values(PLAIN._replace(positions=2, **widths))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "silu", "normed_persistent": False, "layers": 2},
        {"activation": "relu_squared", "norm": "none"},
        {"activation": "gelu_tanh", "biases": True},
    ],
    ids=lambda changes: changes["activation"],
)
def test_switches_of_a_layer_are_the_reference_s(changes):
    check_values(PLAIN._replace(positions=3, **changes))


@pytest.mark.slow
def test_gradients_are_taken_from_what_the_kernel_keeps():
    case = PLAIN._replace(positions=19)
    z, gradients = values_and_gradients(mosaic_gpu, case)
    want_z, want = reference(case)
    assert_values_close(z, want_z, case.dtype)
    assert_gradients_close(gradients, want, case.dtype)


def test_a_layer_of_the_paper_is_held_by_128_programs():
    programs = choose_programs(PAPER, most=132, shared=SHARED)
    assert programs == 128
    shares = share_out(PAPER, programs)
    assert shares is not None
    # Every weight lies in one program, and every column is finished by one.
    D, HE, F = PAPER
    held = 64 * programs * sum(share.depth for share in shares)
    assert held == HE * D + 2 * D * F + 2 * D * HE
    finished = [programs * share.columns for share in shares]
    assert finished == [D, F, D, 2 * HE]
    assert shared_bytes(shares) <= SHARED


@pytest.mark.parametrize(
    ("widths", "most"),
    [
        (LayerWidths(2048, 2048, 8192), 132),  # 92 MB of weights
        (PAPER, 114),  # an H100 on PCIe
        (LayerWidths(96, 64, 256), 132),
    ],
)
def test_what_cannot_be_held_at_once_is_refused(widths, most):
    told = str(refusal_of_widths(widths, most=most, shared=SHARED))
    assert told.startswith(f"finds no cut of D={widths.model}, ")
    assert f"into at most {most} programs" in told


def test_what_the_kernel_cannot_do_is_refused_with_a_reason():
    spec, change = PLAIN.spec, dataclasses.replace
    refused = partial(refusal, mosaic_gpu)
    assert refused(PLAIN) is None
    assert "cache" in str(refused(PLAIN, slots=32))
    assert "wavefront" in str(refused(PLAIN, schedule="wavefront"))
    assert "float32" in str(refused(PLAIN, spec=change(spec, dtype="float32")))
    assert "key heads" in str(refused(PLAIN._replace(key_heads=1)))
    assert "heads of 64" in str(refused(PLAIN._replace(head_width=32)))
    assert "gate" in str(refused(PLAIN._replace(gated=True)))
    assert '"layer"' in str(refused(PLAIN._replace(norm="layer")))
    assert "no cut" in str(refused(PLAIN._replace(width=32)))
    # What Triton refuses it does: its kernels read the prefix and go back.
    assert "block=2" in str(refused(PLAIN, spec=change(spec, block=2)))
    documents = Rows(segments=jnp.zeros((2, 5), jnp.int32))
    assert "segments" in str(refused(PLAIN, rows=documents))


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (H100, None),
        (
            Target(platform="cpu", kind="cpu"),
            "needs an NVIDIA GPU of compute capability 9.0, found cpu",
        ),
        (
            Target(platform="gpu", kind="A100", compute_capability="8.0"),
            "needs compute capability 9.0, found 8.0",
        ),
    ],
)
def test_the_backend_asks_the_target(device, reason):
    x, weights, _ = PLAIN.inputs()
    cache = empty_cache(1, PLAIN.batch, 0, PLAIN.spec)
    with as_if(device):
        told = mosaic_gpu.supported(x, weights, cache, Rows(), **PLAIN.options)
    assert told == reason


@pytest.mark.parametrize("named", [None, "mosaic_gpu"])
def test_it_runs_only_when_it_is_named(named):
    x, weights, _ = PLAIN.inputs()
    cache = empty_cache(1, PLAIN.batch, 0, PLAIN.spec)
    call = partial(recurrent_prefill, implementation=named, **PLAIN.options)
    with as_if(H100):
        traced = str(jax.make_jaxpr(call)(x, weights, cache))
    assert ("recurrent_tile" in traced) == (named == "mosaic_gpu")
