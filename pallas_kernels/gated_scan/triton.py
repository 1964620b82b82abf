"""GPU path: Pallas kernels lowered by Triton, a few channels of a stretch a program."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from pallas_kernels.dispatch import refusal_of_one_position
from pallas_kernels.gated_scan.block_sizes import BlockSizes, choose
from pallas_kernels.gated_scan.inputs import (
    GateLogits,
    array_of,
    as_given,
    bias_of,
    find_resets,
    narrowest,
    refusal_of_streams,
)
from pallas_kernels.gated_scan.queries import (
    ends_of,
    head_of,
    pull_apart,
    read_apart,
)
from pallas_kernels.gated_scan.triton_backward import run_backward
from pallas_kernels.gated_scan.triton_forward import run_forward
from pallas_kernels.gated_scan.triton_launch import (
    MOST_TILES,
    Call,
    GateInputs,
    Tiles,
    choose_tiles,
    refusal_of_tiles,
)
from pallas_kernels.target import refusal_of_triton

Array = jax.Array


def supported(gate, *arrays, **options) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    reason = refusal_of_triton() or refusal_of_one_position(array_of(gate))
    return reason or expressible(gate, *arrays, **options)


def expressible(
    gate, values, initial, starts, lengths, queries, *, chunk, blocks=None
) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    D, W = gate.shape[2], narrowest(values)
    if W % 16:
        return f"the narrowest width must be a multiple of 16, got {W}"
    between = [v.shape[2] for v in values if v.shape[2] not in (W, D)]
    if between:
        return f"streams have {D} channels or one other width, got {W} and {between}"
    if D // W > MOST_TILES:
        return f"tiles a stream {MOST_TILES} times at most, got {D // W}"
    reason = refusal_of_streams(gate, values, queries)
    if reason is not None:
        return reason
    arrays = (gate, values, starts, lengths, queries)
    blocks = choose("triton", *arrays, chunk=chunk, blocks=blocks)
    if not blocks.given():
        return None
    tiles, head = _tiles(*arrays, chunk, blocks)
    return refusal_of_tiles(tiles, width=W, head=head)


def forward(
    gate: Float[Array, "B T D"] | GateLogits,
    values: tuple[Float[Array, "B T _"], ...],
    initial: tuple[Float[Array, "B D"], ...],
    starts: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
    queries: Float[Array, "B T N E"] | None,
    *,
    chunk: int | None,
    residuals: bool = True,
    interpret: Any = False,
    blocks: BlockSizes | None = None,
):
    """Returns (states, finals, logits, all states): see `queried_scan`.

    Args:
      residuals: False: nothing is differentiated, and all states are left out (None).
      interpret: runs the kernels as plain JAX, on any device.
      blocks: sizes; None: measured ones; what is None in them is the heuristic's.
    """
    call, gates = _cut(gate, values, starts, lengths, queries, chunk, interpret, blocks)
    call = replace(call, keeps=residuals or not call.read)
    states, finals, sums = run_forward(
        call,
        gates,
        tuple(_by_tile(v, call) for v in values),
        tuple(_by_tile(h.astype(jnp.float32), call) for h in initial),
        None if lengths is None else lengths.astype(jnp.int32),
        (_by_tile(queries, call),) if queries is not None and call.read else (),
    )
    B, T, D = gate.shape
    states = tuple(h.reshape(B, -1, D) for h in states)
    finals = tuple(h.reshape(B, D) for h in finals)
    kept = states if residuals else None
    if sums is None:
        return read_apart((states, finals, None, kept), queries, chunk=chunk)
    if residuals:
        states = (*states[:-1], ends_of(states[-1], call.tiles.positions))
    # A head's parts are next to each other.
    logits = sums.reshape(B, T, D // call.head, -1).sum(-1)
    return states, finals, logits, kept


def backward(
    gate: Float[Array, "B T D"] | GateLogits,
    values: tuple[Float[Array, "B T _"], ...],
    initial: tuple[Float[Array, "B D"], ...],
    starts: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
    queries: Float[Array, "B T N E"] | None,
    states: tuple[Float[Array, "B T D"], ...],
    d_states: tuple[Float[Array, "B _ D"], ...],
    d_finals: tuple[Float[Array, "B D"], ...],
    d_logits: Float[Array, "B T H"] | None,
    *,
    chunk: int | None,
    interpret: Any = False,
    blocks: BlockSizes | None = None,
):
    """Returns gradients of (gate, values, initial, queries)."""
    call, gates = _cut(gate, values, starts, lengths, queries, chunk, interpret, blocks)
    reading, dq = (), None
    if queries is not None and d_logits is not None and call.read:
        of_heads = d_logits.astype(jnp.float32)
        of_heads = of_heads.reshape(call.B * call.T, call.D // call.width, -1)
        reading = (_by_tile(queries, call), of_heads)
    else:
        d_states, dq = pull_apart(queries, states, d_states, d_logits, chunk=chunk)
    d_gate, d_bias, d_values, d_initial, d_queries = run_backward(
        call,
        gates,
        tuple(_by_tile(v, call) for v in values),
        tuple(_by_tile(h.astype(jnp.float32), call) for h in initial),
        None if lengths is None else lengths.astype(jnp.int32),
        tuple(_by_tile(h, call) for h in states),
        tuple(_by_tile(d, call) for d in d_states),
        tuple(_by_tile(d.astype(jnp.float32), call) for d in d_finals),
        reading,
    )
    if queries is not None and d_queries is not None:
        dq = d_queries.reshape(queries.shape)
    d_values = tuple(d.reshape(v.shape) for d, v in zip(d_values, values, strict=True))
    d_initial = tuple(d.reshape(call.B, call.D) for d in d_initial)
    d_gate = as_given(gate, d_gate.reshape(gate.shape), d_bias)
    return d_gate, d_values, d_initial, dq


def _cut(gate, values, starts, lengths, queries, chunk, interpret, blocks):
    """Returns (how the call is cut, what its kernels read of the gate)."""
    (B, T, D), W = gate.shape, narrowest(values)
    tiles, head = _tiles(gate, values, starts, lengths, queries, chunk, blocks)
    period = chunk if tiles.linked and chunk is not None and chunk < T else None
    resets, bias = find_resets(T, starts, period), bias_of(gate)
    call = Call(
        B=B,
        T=T,
        D=D,
        width=W,
        streams=len(values),
        lengths=lengths is not None,
        logits=bias is not None,
        resets=0 if resets is None else len(resets),
        tiles=tiles,
        # A chunk's end is what a stretch ends with; linked stretches are no chunks.
        head=0 if tiles.linked else head,
        interpret=interpret,
    )
    inputs = GateInputs(
        gate=_by_tile(array_of(gate), call),
        bias=() if bias is None else (_by_tile(bias[None], call),),
        resets=() if resets is None else (resets.astype(jnp.int32).reshape(-1),),
    )
    return call, inputs


def _tiles(gate, values, starts, lengths, queries, chunk, blocks) -> tuple[Tiles, int]:
    """Returns the cut, and E where queries can be read in the kernel, else 0."""
    (B, T, D), W, head = gate.shape, narrowest(values), head_of(queries)
    # Queries of heads whose channels programs cannot share evenly read apart.
    head = head if head and head % 16 == W % head == 0 else 0
    arrays = (gate, values, starts, lengths, queries)
    blocks = choose("triton", *arrays, chunk=chunk, blocks=blocks)
    sizes = {"B": B, "T": T, "D": D, "width": W, "chunk": chunk, "head": head}
    return choose_tiles(**sizes, blocks=blocks), head


def _by_tile(x: Array, call: Call) -> Array:
    """Returns [lines, tiles, W] of an array [B, T, ...] or [B, D]."""
    lines = x.shape[0] * x.shape[1] if x.ndim > 2 else len(x)
    return x.reshape(lines, -1, call.width)
