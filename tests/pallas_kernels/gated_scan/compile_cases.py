"""Calls at the paper's sizes, as shapes, for `tests/compile_target.py`."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.gated_scan import (
    GateLogits,
    gate_of,
    gated_scan,
    mosaic_tpu,
    triton,
    xla,
)
from pallas_kernels.gated_scan.call import (
    GatedScanCall,
    GatedScanOptions,
    ScanOutputs,
)


def scan(
    backend,
    way,
    *,
    B,
    T,
    D=2048,
    narrow=None,
    chunk=None,
    dtype="bfloat16",
    given=None,
    head=0,
    residuals=True,
    ragged=False,
):
    """Returns a pass as a function of arrays, and their shapes.

    Args:
      way: "forward" or "backward".
      narrow: width of the second stream (RAT's keys); None: one stream (the RNN).
      given: dtype of a gate that is given as it is; None: logits like the streams.
      head: E of the queries that read the second stream; 0: none do.
      residuals: whether a backward pass follows.
      ragged: whether rows have documents and lengths.
    """
    widths = (D,) if narrow is None else (D, narrow)
    gate = jax.ShapeDtypeStruct((B, T, D), dtype if given is None else given)
    if given is None:
        gate = GateLogits(gate, jax.ShapeDtypeStruct((D,), jnp.float32))
    values = tuple(jax.ShapeDtypeStruct((B, T, W), dtype) for W in widths)
    initial = tuple(jax.ShapeDtypeStruct((B, D), jnp.float32) for _ in widths)
    states = tuple(jax.ShapeDtypeStruct((B, T, D), dtype) for _ in widths)
    d_states, queries, d_logits = states, None, None
    if head:
        # As a product makes them: groups and channels in one axis.
        queries = jax.ShapeDtypeStruct((B, T, widths[-1]), dtype)
        d_logits = jax.ShapeDtypeStruct((B, T, D // head), jnp.float32)
        of_ends = jax.ShapeDtypeStruct((B, T // chunk, D), dtype)
        d_states = (*states[:-1], of_ends)

    rows = (None, None)
    if ragged:
        lengths = jax.ShapeDtypeStruct((B,), jnp.int32)
        rows = (jax.ShapeDtypeStruct((B, T), bool), lengths)

    def by_group(queries):
        return queries.reshape(B, T, -1, head) if head else None

    def call_of(gate, values, initial, queries, rows):
        queries, options = by_group(queries), GatedScanOptions(chunk=chunk)
        return GatedScanCall(gate, values, initial, *rows, queries, options)

    def forward(*arrays):
        call = call_of(*arrays)
        if backend is not xla:
            reason = backend.expressible(call)
            assert reason is None, reason
        (states, *rest), saved = backend.forward(call, residuals=residuals)
        # All other saved states are among the outputs.
        return states, rest, saved[-1] if head and residuals else None

    def backward(gate, values, initial, queries, rows, states, *cotangents):
        call = call_of(gate, values, initial, queries, rows)
        of = backend.backward(call, states, ScanOutputs(*cotangents))
        of_queries = of.queries.reshape(queries.shape) if head else None
        return [of.gate, of.values, of.initial], of_queries

    if way == "forward":
        return forward, (gate, values, initial, queries, rows)
    cotangents = (d_states, initial, d_logits)
    return backward, (gate, values, initial, queries, rows, states, *cotangents)


def training(*, B, T, D=2048, narrow=256, chunk=16, apart=False):
    """Returns both passes of RAT's scan, from the product's logits to their gradient.

    Args:
      apart: has the sigmoid in front of the op, as if it took a gate only.
    """
    shape = partial(jax.ShapeDtypeStruct, dtype="bfloat16")
    gate = GateLogits(shape((B, T, D)), jax.ShapeDtypeStruct((D,), jnp.float32))
    values, d_states = (
        (shape((B, T, D)), shape((B, T, narrow))),
        (shape((B, T, D)),) * 2,
    )

    def run(gate, values, d_states):
        def scanned(gate, values):
            gate = gate_of(gate) if apart else gate
            return gated_scan(gate, values, chunk=chunk).states

        out, pull = jax.vjp(scanned, gate, values)
        return out, pull(d_states)

    return run, (gate, values, d_states)


def inference(*, apart=False, **sizes):
    """Returns the forward pass of `training` alone."""
    _, (gate, values, _) = training(**sizes)

    def run(gate, values):
        gate = gate_of(gate) if apart else gate
        return gated_scan(gate, values, chunk=16).states

    return run, (gate, values)


_gpu = partial(scan, triton, B=64, T=4096)
_tpu = partial(scan, mosaic_tpu, B=8, T=4096)
_rat = {"narrow": 256, "chunk": 16}
_queried = {**_rat, "head": 128}
_long = {"B": 1, "T": 262144}

gpu_rnn_forward = partial(_gpu, "forward")
gpu_rnn_backward = partial(_gpu, "backward")
gpu_rat_forward = partial(_gpu, "forward", **_rat)
gpu_rat_backward = partial(_gpu, "backward", **_rat)
gpu_queried_forward = partial(_gpu, "forward", **_queried)
gpu_queried_inference = partial(_gpu, "forward", residuals=False, **_queried)
gpu_queried_backward = partial(_gpu, "backward", **_queried)
_sixteen = {"narrow": 128, "chunk": 16, "head": 128}
gpu_sixteen_tiles_forward = partial(_gpu, "forward", **_sixteen)
gpu_sixteen_tiles_backward = partial(_gpu, "backward", **_sixteen)
gpu_given_forward = partial(_gpu, "forward", given="float32", **_rat)
gpu_given_backward = partial(_gpu, "backward", given="float32", **_rat)
gpu_float32_backward = partial(
    _gpu, "backward", dtype="float32", given="float32", **_rat
)
gpu_long_forward = partial(scan, triton, "forward", **_long)
gpu_long_backward = partial(scan, triton, "backward", **_long)
gpu_ragged_forward = partial(_gpu, "forward", ragged=True, **_queried)
gpu_ragged_backward = partial(_gpu, "backward", ragged=True, **_queried)
gpu_long_ragged_forward = partial(scan, triton, "forward", ragged=True, **_long)
gpu_long_ragged_backward = partial(scan, triton, "backward", ragged=True, **_long)
gpu_decode = partial(scan, xla, "forward", B=512, T=1, **_rat)
gpu_inference = partial(inference, B=64, T=4096)
gpu_inference_apart = partial(inference, B=64, T=4096, apart=True)
gpu_training = partial(training, B=64, T=4096)
gpu_training_apart = partial(training, B=64, T=4096, apart=True)
tpu_rnn_forward = partial(_tpu, "forward")
tpu_rnn_backward = partial(_tpu, "backward")
tpu_rat_forward = partial(_tpu, "forward", **_rat)
tpu_rat_backward = partial(_tpu, "backward", **_rat)
tpu_queried_forward = partial(_tpu, "forward", **_queried)
tpu_queried_inference = partial(_tpu, "forward", residuals=False, **_queried)
tpu_queried_backward = partial(_tpu, "backward", **_queried)
tpu_float32_backward = partial(_tpu, "backward", dtype="float32", **_rat)
tpu_odd_backward = partial(_tpu, "backward", D=384, narrow=96, chunk=5)
tpu_training = partial(training, B=8, T=4096)
tpu_training_apart = partial(training, B=8, T=4096, apart=True)
