"""GPU path: Pallas kernels lowered by Triton, a few channels of a stretch a program."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import refusal_of_one_position
from pallas_kernels.gated_scan.call import (
    GatedScanCall,
    ScanOutputs,
    States,
    array_of,
    as_given,
    bias_of,
    find_resets,
    refusal_of_streams,
)
from pallas_kernels.gated_scan.queries import (
    ends_of,
    pull_apart,
    read_apart,
)
from pallas_kernels.gated_scan.triton_backward import run_backward
from pallas_kernels.gated_scan.triton_forward import run_forward
from pallas_kernels.gated_scan.triton_launch import (
    MOST_TILES,
    GateInputs,
    Launch,
    Tiles,
    choose_tiles,
    refusal_of_tiles,
)
from pallas_kernels.target import refusal_of_triton

Array = jax.Array


def supported(call: GatedScanCall) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    reason = refusal_of_triton() or refusal_of_one_position(array_of(call.gate))
    return reason or expressible(call)


def expressible(call: GatedScanCall) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    D, W = call.gate.shape[2], call.narrowest
    if W % 16:
        return f"the narrowest width must be a multiple of 16, got {W}"
    between = [v.shape[2] for v in call.values if v.shape[2] not in (W, D)]
    if between:
        return f"streams have {D} channels or one other width, got {W} and {between}"
    if D // W > MOST_TILES:
        return f"tiles a stream {MOST_TILES} times at most, got {D // W}"
    reason = refusal_of_streams(call)
    if reason is not None or not call.options.blocks.given():
        return reason
    tiles, head = _tiles(call)
    return refusal_of_tiles(tiles, width=W, head=head)


def forward(
    call: GatedScanCall, *, residuals: bool
) -> tuple[ScanOutputs, States | None]:
    """Returns the outputs, and all states, None where they are left out."""
    launch, gates = _cut(call)
    launch = replace(launch, keeps=residuals or not launch.read)
    lengths, queries = call.lengths, call.queries
    states, finals, sums = run_forward(
        launch,
        gates,
        tuple(_by_tile(v, launch) for v in call.values),
        tuple(_by_tile(h.astype(jnp.float32), launch) for h in call.initial),
        None if lengths is None else lengths.astype(jnp.int32),
        (_by_tile(queries, launch),) if queries is not None and launch.read else (),
    )
    B, T, D = call.gate.shape
    states = tuple(h.reshape(B, -1, D) for h in states)
    finals = tuple(h.reshape(B, D) for h in finals)
    saved = states if residuals else None
    if sums is None:
        return read_apart(call, states, finals), saved
    if residuals:
        states = (*states[:-1], ends_of(states[-1], launch.tiles.positions))
    # A head's parts are next to each other.
    logits = sums.reshape(B, T, D // launch.head, -1).sum(-1)
    return ScanOutputs(states, finals, logits), saved


def backward(
    call: GatedScanCall, residuals: States, cotangents: ScanOutputs
) -> GatedScanCall:
    """Returns gradients in place of the arrays."""
    launch, gates = _cut(call)
    lengths, queries = call.lengths, call.queries
    d_states, d_finals, d_logits = cotangents
    reading, dq = (), None
    if queries is not None and d_logits is not None and launch.read:
        of_heads = d_logits.astype(jnp.float32)
        of_heads = of_heads.reshape(launch.B * launch.T, launch.D // launch.width, -1)
        reading = (_by_tile(queries, launch), of_heads)
    else:
        d_states, dq = pull_apart(call, residuals, cotangents)
    d_gate, d_bias, d_values, d_initial, d_queries = run_backward(
        launch,
        gates,
        tuple(_by_tile(v, launch) for v in call.values),
        tuple(_by_tile(h.astype(jnp.float32), launch) for h in call.initial),
        None if lengths is None else lengths.astype(jnp.int32),
        tuple(_by_tile(h, launch) for h in residuals),
        tuple(_by_tile(d, launch) for d in d_states),
        tuple(_by_tile(d.astype(jnp.float32), launch) for d in d_finals),
        reading,
    )
    if queries is not None and d_queries is not None:
        dq = d_queries.reshape(queries.shape)
    shapes = (v.shape for v in call.values)
    d_values = tuple(map(jnp.reshape, d_values, shapes))
    d_initial = tuple(d.reshape(launch.B, launch.D) for d in d_initial)
    return call._replace(
        gate=as_given(call.gate, d_gate.reshape(call.gate.shape), d_bias),
        values=d_values,
        initial=d_initial,
        starts=None,
        lengths=None,
        queries=dq,
    )


def _cut(call: GatedScanCall) -> tuple[Launch, GateInputs]:
    """Returns (how the call is cut, what its kernels read of the gate)."""
    B, T, D = call.gate.shape
    tiles, head = _tiles(call)
    # Stretches that are linked may be longer than a chunk.
    period = call.period if tiles.linked else None
    resets, bias = find_resets(T, call.starts, period), bias_of(call.gate)
    launch = Launch(
        B=B,
        T=T,
        D=D,
        width=call.narrowest,
        streams=len(call.values),
        lengths=call.lengths is not None,
        logits=bias is not None,
        resets=0 if resets is None else len(resets),
        tiles=tiles,
        # A chunk's end is what a stretch ends with; linked stretches are not chunks.
        head=0 if tiles.linked else head,
        interpret=call.options.interpret,
    )
    inputs = GateInputs(
        gate=_by_tile(array_of(call.gate), launch),
        bias=() if bias is None else (_by_tile(bias[None], launch),),
        resets=() if resets is None else (resets.astype(jnp.int32).reshape(-1),),
    )
    return launch, inputs


def _tiles(call: GatedScanCall) -> tuple[Tiles, int]:
    """Returns the cut, and E where queries can be read in the kernel, else 0."""
    (B, T, D), W, head = call.gate.shape, call.narrowest, call.head
    # Queries of heads whose channels programs cannot share evenly read apart.
    head = head if head and head % 16 == W % head == 0 else 0
    tiles = choose_tiles(
        B=B,
        T=T,
        D=D,
        width=W,
        chunk=call.options.chunk,
        head=head,
        blocks=call.options.blocks,
    )
    return tiles, head


def _by_tile(x: Array, launch: Launch) -> Array:
    """Returns [lines, tiles, W] of an array [B, T, ...] or [B, D]."""
    lines = x.shape[0] * x.shape[1] if x.ndim > 2 else len(x)
    return x.reshape(lines, -1, launch.width)
