"""TPU path: one kernel per pass, the state in VMEM from block to block."""

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
from pallas_kernels.gated_scan.mosaic_backward import run_backward
from pallas_kernels.gated_scan.mosaic_forward import run_forward
from pallas_kernels.gated_scan.mosaic_launch import (
    LANES,
    STRETCHES,
    GateInputs,
    Launch,
    Tiles,
    choose_tiles,
    refusal_of_channels,
    refusal_of_tiles,
)
from pallas_kernels.gated_scan.queries import (
    ends_of,
    pull_apart,
    read_apart,
)
from pallas_kernels.target import refusal_of_mosaic_tpu

Array = jax.Array


def supported(call: GatedScanCall) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    reason = refusal_of_mosaic_tpu() or refusal_of_one_position(array_of(call.gate))
    return reason or expressible(call)


def expressible(call: GatedScanCall) -> str | None:
    """Returns why the kernels cannot compute a call on any device, or None."""
    D, streams = call.gate.shape[2] + -call.gate.shape[2] % LANES, len(call.values)
    reason = refusal_of_channels(D, streams) or refusal_of_streams(call)
    if reason is not None:
        return reason
    blocks = call.options.blocks
    reason = blocks.refusal_beyond("stretch")
    if reason is not None or not blocks.given():
        return reason
    return refusal_of_tiles(_tiles(call), D, streams)


def forward(
    call: GatedScanCall, *, residuals: bool
) -> tuple[ScanOutputs, States | None]:
    """Returns the outputs, and all states, None where they are left out."""
    _, T, D = call.gate.shape
    launch, gates = _cut(call)
    launch = replace(launch, keeps=residuals or not launch.read)
    states, finals, logits = run_forward(
        launch,
        gates,
        tuple(_whole_lanes(v, D) for v in call.values),
        tuple(_padded(h.astype(jnp.float32)) for h in call.initial),
        _lengths(call),
        (_flat(call.queries),) if launch.read else (),
    )
    states, finals = (tuple(h[..., :D] for h in each) for each in (states, finals))
    saved = states if residuals else None
    if logits is None:
        return read_apart(call, states, finals), saved
    C = launch.tiles.stretch
    # The last block's chunks beyond the sequence end nothing.
    ends = ends_of(states[-1], C) if residuals else states[-1][:, : T // C]
    logits = logits[..., : D // launch.head]
    return ScanOutputs((*states[:-1], ends), finals, logits), saved


def backward(
    call: GatedScanCall, residuals: States, cotangents: ScanOutputs
) -> GatedScanCall:
    """Returns the call's gradients, each in the place of its array."""
    D, queries, lengths = call.gate.shape[2], call.queries, call.lengths
    d_states, d_finals, d_logits = cotangents
    launch, gates = _cut(call)
    reading, dq = (), None
    if queries is not None and d_logits is not None and launch.read:
        reading = (_flat(queries), _padded(d_logits.astype(jnp.float32)))
        missing = STRETCHES * launch.blocks - d_states[-1].shape[1]
        of_ends = jnp.pad(d_states[-1], ((0, 0), (0, missing), (0, 0)))
        d_states = (*d_states[:-1], of_ends)
    else:
        d_states, dq = pull_apart(call, residuals, cotangents)
    d_gate, d_bias, d_values, d_initial, d_queries = run_backward(
        launch,
        gates,
        tuple(_whole_lanes(v, D) for v in call.values),
        tuple(_padded(h.astype(jnp.float32)) for h in call.initial),
        _lengths(call),
        tuple(_padded(h) for h in residuals),
        tuple(_padded(d) for d in d_states),
        tuple(_padded(d.astype(jnp.float32)) for d in d_finals),
        reading,
    )
    if queries is not None and d_queries is not None:
        dq = d_queries.reshape(queries.shape)
    d_values = tuple(
        d if d.shape == v.shape else _narrow(d[..., :D], v.shape[2])
        for d, v in zip(d_values, call.values, strict=True)
    )
    d_initial = tuple(d[..., :D] for d in d_initial)
    if lengths is not None:  # A row without a position ends where it began.
        none = (lengths == 0)[:, None]
        d_initial = tuple(
            d + jnp.where(none, more, 0)
            for d, more in zip(d_initial, d_finals, strict=True)
        )
    d_bias = None if d_bias is None else d_bias[:D]
    return call._replace(
        gate=as_given(call.gate, d_gate[..., :D], d_bias),
        values=d_values,
        initial=d_initial,
        starts=None,
        lengths=None,
        queries=dq,
    )


def _cut(call: GatedScanCall) -> tuple[Launch, GateInputs]:
    """Returns (how the call is cut, what its kernels read of the gate)."""
    B, T, D = call.gate.shape
    padded = D + -D % LANES
    tiles = _tiles(call)
    # Stretches that are linked may be longer than a chunk.
    period = call.period if tiles.linked else None
    resets, bias = find_resets(T, call.starts, period), bias_of(call.gate)
    widths = (v.shape[2] for v in call.values)
    launch = Launch(
        B=B,
        T=T,
        D=padded,
        widths=tuple(padded if width % LANES else width for width in widths),
        logits=bias is not None,
        resets=0 if resets is None else len(resets),
        tiles=tiles,
        head=_head_read(call, tiles),
        interpret=call.options.interpret,
    )
    inputs = GateInputs(
        gate=_padded(array_of(call.gate)),
        bias=() if bias is None else (_padded(bias[None]),),
        resets=() if resets is None else (_over_lanes(resets),),
    )
    return launch, inputs


def _tiles(call: GatedScanCall) -> Tiles:
    _, T, D = call.gate.shape
    return choose_tiles(
        T=T,
        D=D + -D % LANES,
        streams=len(call.values),
        chunk=call.options.chunk,
        blocks=call.options.blocks,
    )


def _head_read(call: GatedScanCall, tiles: Tiles) -> int:
    """Returns E where the kernels read for the queries; 0: they are read apart."""
    # The ends that kernels see are those of stretches; heads are lanes of one register.
    head, D, W = call.head, call.gate.shape[2], call.values[-1].shape[2]
    aligned = D % LANES == 0 and W % LANES == 0
    if tiles.linked or not head or not aligned or D // head > LANES:
        return 0
    return head


def _flat(queries):
    return queries.reshape(*queries.shape[:2], -1)


def _over_lanes(resets):
    """Gives each position a register's lanes: 1 where its state is reset."""
    # A sixteenth of a gate of 2048 channels. [B, T] would have to be turned on chip.
    narrow = resets[..., None].astype(jnp.bfloat16)
    return jnp.broadcast_to(narrow, (*resets.shape, LANES))


def _lengths(call: GatedScanCall):
    B, T, _ = call.gate.shape
    if call.lengths is None:
        return jnp.full(B, T, jnp.int32)
    return call.lengths.astype(jnp.int32)


def _whole_lanes(v, D: int):
    """Tiles a stream of odd width to D channels, and those to full registers."""
    if v.shape[2] % LANES == 0:
        return v
    return _padded(jnp.tile(v, (1, 1, D // v.shape[2])))


def _narrow(wide, width: int):
    """Sums a gradient over the tiles of its stream."""
    tiles = wide.reshape(*wide.shape[:-1], -1, width)
    return jnp.sum(tiles, axis=-2, dtype=jnp.float32)


def _padded(x):
    """Pads the channels to full registers."""
    missing = -x.shape[-1] % LANES
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
