"""Mamba's scan by backend, and its block sizes tuned."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.selective_scan import BlockSizes, selective_scan
from pallas_kernels.selective_scan.api import CHUNK, OP
from pallas_kernels.selective_scan.call import (
    SelectiveScanCall,
    SelectiveScanOptions,
)
from recurjax.bench.op_by_backend import (
    Call,
    Candidates,
    Dtype,
    OpBench,
    as_one_device_has_it,
    drawn,
    rows_of_step,
    summary,
)
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.variants.recurformer import RecurFormerConfig

SMALL = ({"B": 1, "T": 2048, "I": 512, "N": 16},)
"""A small mixer for two CPU cores."""

LARGE = ({"B": 8, "T": 4096, "I": 2048, "N": 16},)
"""A large one for one accelerator."""

CANDIDATES: Candidates = {
    "triton": {
        "channels": (16, 32, 64, 128),
        "unroll": (1, 2, 4, 8, 16),
        "warps": (1, 2, 4),
        "backward_channels": (16, 32, 64, 128, 256),
        "backward_unroll": (1, 2, 4, 8),
        "backward_warps": (1, 2, 4, 8, 16),
    },
    "mosaic_tpu": {
        "channels": (128, 256, 384, 512, 1024, 2048),
        "unroll": (1, 2, 4, 8, 16),
    },
    "xla": {"unroll": (1, 2, 4, 8, 16)},
}


def calls_of_run(experiment: Experiment) -> list[Call]:
    """Returns the calls that one device has in a step of the run.

    Layers with as many replaced heads have the same.
    """
    stack = experiment.model.stack
    if not isinstance(stack, RecurFormerConfig) or not any(stack.replaced):
        raise UserError(
            f"{experiment.name} trains a {type(stack).__name__} without Mamba: only a "
            "RecurFormer with replaced heads has the op selective_scan"
        )
    each = {"B": rows_of_step(experiment), "T": experiment.training.length}
    each |= {"N": stack.mamba.state}
    widths = (stack.heads(layer).mamba_width for layer in range(stack.layers))
    calls = []
    for width in dict.fromkeys(width for width in widths if width):
        sizes = each | {"I": stack.mamba.expand * width}
        shapes = _shapes(sizes, experiment.model.dtype, experiment.has_segments)
        calls.append(call_of(as_one_device_has_it(OP, shapes, experiment)))
    return calls


def call_of(shapes: SelectiveScanCall) -> Call:
    """Makes a call of random arrays, as the op's backends take them."""
    call = drawn(shapes)
    # Decays that stay inside (0, 1): long rows neither vanish nor overflow.
    call = call._replace(a=-jnp.exp(call.a))
    (B, T, I), N = call.u.shape, call.a.shape[1]

    def run(call, **options):
        arrays = call._asdict()
        chunk = arrays.pop("options").chunk
        return selective_scan(**arrays, chunk=chunk, **options).y

    return Call(
        op=OP,
        function=run,
        arrays=(call,),
        shape={"B": B, "T": T, "I": I, "N": N},
        shape_class=call.shape_class,
        sized=lambda sizes: {"blocks": BlockSizes(**sizes)},
    )


def _calls(large: bool, dtype: Dtype) -> Iterator[Call]:
    for sizes in LARGE if large else SMALL:
        yield call_of(_shapes(sizes, dtype, packed=False))


def _shapes(sizes: Mapping[str, int], dtype: str, packed: bool) -> SelectiveScanCall:
    B, T, I, N = (sizes[letter] for letter in "BTIN")
    shape = jax.ShapeDtypeStruct
    wide = jnp.promote_types(dtype, jnp.float32)
    by_channel, by_state = shape((B, T, I), dtype), shape((B, T, N), dtype)
    row = shape((I,), wide)
    arrays: dict[str, Any] = {
        "u": by_channel,
        "dt": by_channel,
        "a": shape((I, N), wide),
        "b": by_state,
        "c": by_state,
        "skip": row,
        "z": by_channel,
        "dt_bias": row,
        "initial": shape((B, I, N), wide),
        "starts": shape((B, T), jnp.bool_) if packed else None,
    }
    return SelectiveScanCall(**arrays, options=SelectiveScanOptions(chunk=CHUNK))


__all__ = ["rows", "summary", "tune"]
_BENCH = OpBench(calls=_calls, calls_of_run=calls_of_run, candidates=CANDIDATES)
rows, tune = _BENCH.rows, _BENCH.tune
