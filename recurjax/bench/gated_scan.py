"""The scan of RAT and its RNN by backend, and its block sizes tuned."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_scan import (
    BlockSizes,
    GateLogits,
    gated_scan,
    queried_scan,
)
from pallas_kernels.gated_scan.api import OP
from pallas_kernels.gated_scan.call import GatedScanCall, GatedScanOptions
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
from recurjax.variants.rat import RatConfig, RatMixerConfig, RnnMixerConfig

SMALL = (
    {"B": 1, "T": 4096, "D": 256, "W": 128, "E": 64, "C": 16},
    {"B": 1, "T": 4096, "D": 256},
)
"""RAT(16), whose queries of width E read W channels of keys, and the RNN, for two CPU
cores."""

LARGE = (
    {"B": 64, "T": 4096, "D": 2048, "W": 256, "E": 128, "C": 16},
    {"B": 64, "T": 4096, "D": 2048},
    {"B": 1, "T": 262144, "D": 2048},
)
"""Those of the 1.3B model for one accelerator, and the RNN on one long row."""

CANDIDATES: Candidates = {
    "triton": {
        "stretch": (16, 32, 64, 128, 256, 512, 1024, 4096),
        "channels": (16, 32, 64, 128),
        "unroll": (1, 2, 4, 8, 16),
        "warps": (1, 2, 4),
    },
    "mosaic_tpu": {"stretch": (4, 8, 16, 32, 64, 128)},
    "xla": {"stretch": (32, 64, 128, 256, 512)},
}


def calls_of_run(experiment: Experiment) -> list[Call]:
    """Returns the calls that one device has in a step of the run."""
    stack = experiment.model.stack
    B, length = rows_of_step(experiment), experiment.training.length
    found: list[dict[str, int]] = []
    mixers = stack.pattern if isinstance(stack, RatConfig) else ()
    for mixer in dict.fromkeys(mixers):
        if isinstance(mixer, RnnMixerConfig):
            found.append({"B": B, "T": length, "D": mixer.heads * mixer.head_width})
        elif isinstance(mixer, RatMixerConfig):
            E, C = mixer.head_width, min(mixer.chunk, length)
            # Whole chunks: the mixer adds what is missing.
            sizes = {"B": B, "T": length + -length % C, "D": mixer.heads * E}
            found.append(sizes | {"W": mixer.groups * E, "E": E, "C": C})
    if not found:
        raise UserError(
            f"{experiment.name} trains a {type(stack).__name__} without a layer of RAT "
            "or its RNN: only these have sizes of the op gated_scan to tune"
        )
    calls = []
    for sizes in found:
        shapes = _shapes(sizes, experiment.model.dtype, experiment.has_segments)
        shapes = as_one_device_has_it(OP, shapes, experiment)
        calls.append(call_of(shapes))
    return calls


def call_of(shapes: GatedScanCall) -> Call:
    """Makes a call of random arrays, as the op's backends take them."""
    call = drawn(shapes)
    B, T, D = call.gate.shape
    shape, chunk = {"B": B, "T": T, "D": D}, call.options.chunk
    if call.queries is not None and chunk is not None:
        shape |= {"W": call.values[-1].shape[2], "E": call.head, "C": chunk}

    # In training every row starts from zero: the op makes that state itself.
    def run(call, **options):
        options["starts"] = call.starts
        if call.queries is None or chunk is None:
            return gated_scan(call.gate, call.values, **options).states
        v, k = call.values
        out = queried_scan(call.gate, v, k, call.queries, chunk=chunk, **options)
        return out.values, out.ends, out.logits

    return Call(
        op=OP,
        function=run,
        arrays=(call,),
        shape=shape,
        shape_class=call.shape_class,
        sized=lambda sizes: {"blocks": BlockSizes(**sizes)},
    )


def _calls(large: bool, dtype: Dtype) -> Iterator[Call]:
    for sizes in LARGE if large else SMALL:
        yield call_of(_shapes(sizes, dtype, packed=False))


def _shapes(sizes: Mapping[str, int], dtype: str, packed: bool) -> GatedScanCall:
    B, T, D = (sizes[letter] for letter in "BTD")
    shape = jax.ShapeDtypeStruct
    wide = jnp.promote_types(dtype, jnp.float32)
    bias = shape((D,), jnp.float32)
    gate = GateLogits(shape((B, T, D), dtype), bias)  # pyright: ignore[reportArgumentType]
    values, queries = (shape((B, T, D), dtype),), None
    if "C" in sizes:
        W, E = sizes["W"], sizes["E"]
        values = (*values, shape((B, T, W), dtype))
        queries = shape((B, T, W // E, E), dtype)
    arrays: dict[str, Any] = {
        "gate": gate,
        "values": values,
        "initial": (shape((B, D), wide),) * len(values),
        "starts": shape((B, T), jnp.bool_) if packed else None,
        "lengths": None,
        "queries": queries,
    }
    return GatedScanCall(**arrays, options=GatedScanOptions(chunk=sizes.get("C")))


__all__ = ["rows", "summary", "tune"]
_BENCH = OpBench(calls=_calls, calls_of_run=calls_of_run, candidates=CANDIDATES)
rows, tune = _BENCH.rows, _BENCH.tune
