"""TPU path: one kernel a pass, the state in VMEM from block to block."""

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
    refusal_of_streams,
)
from pallas_kernels.gated_scan.mosaic_backward import run_backward
from pallas_kernels.gated_scan.mosaic_forward import run_forward
from pallas_kernels.gated_scan.mosaic_launch import (
    LANES,
    STRETCHES,
    Call,
    GateInputs,
    Tiles,
    choose_tiles,
    refusal_of_channels,
    refusal_of_tiles,
)
from pallas_kernels.gated_scan.queries import (
    ends_of,
    head_of,
    pull_apart,
    read_apart,
)
from pallas_kernels.target import refusal_of_mosaic_tpu

Array = jax.Array


def supported(gate, *arrays, **options) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    reason = refusal_of_mosaic_tpu() or refusal_of_one_position(array_of(gate))
    return reason or expressible(gate, *arrays, **options)


def expressible(
    gate, values, initial, starts, lengths, queries, *, chunk, blocks=None
) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    D = gate.shape[2] + -gate.shape[2] % LANES
    reason = refusal_of_channels(D, len(values))
    reason = reason or refusal_of_streams(gate, values, queries)
    if reason is not None:
        return reason
    arrays = (gate, values, starts, lengths, queries)
    blocks = choose("mosaic_tpu", *arrays, chunk=chunk, blocks=blocks)
    reason = blocks.refusal_beyond("stretch")
    if reason is not None or not blocks.given():
        return reason
    tiles = _tiles(*arrays, chunk, blocks)
    return refusal_of_tiles(tiles, D, len(values))


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
      interpret: False, True, or pltpu.InterpretParams for the TPU's own semantics.
      blocks: sizes; None: measured ones; what is None in them is the heuristic's.
    """
    _, T, D = gate.shape
    call, gates = _cut(gate, values, starts, lengths, queries, chunk, interpret, blocks)
    call = replace(call, keeps=residuals or not call.read)
    states, finals, logits = run_forward(
        call,
        gates,
        tuple(_whole_lanes(v, D) for v in values),
        tuple(_padded(h.astype(jnp.float32)) for h in initial),
        _lengths(gate, lengths),
        (_flat(queries),) if call.read else (),
    )
    states, finals = (tuple(h[..., :D] for h in each) for each in (states, finals))
    kept = states if residuals else None
    if logits is None:
        return read_apart((states, finals, None, kept), queries, chunk=chunk)
    C = call.tiles.stretch
    # The last block's chunks beyond the sequence end nothing.
    ends = ends_of(states[-1], C) if residuals else states[-1][:, : T // C]
    return (*states[:-1], ends), finals, logits[..., : D // call.head], kept


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
    D = gate.shape[2]
    call, gates = _cut(gate, values, starts, lengths, queries, chunk, interpret, blocks)
    reading, dq = (), None
    if queries is not None and d_logits is not None and call.read:
        reading = (_flat(queries), _padded(d_logits.astype(jnp.float32)))
        missing = STRETCHES * call.blocks - d_states[-1].shape[1]
        of_ends = jnp.pad(d_states[-1], ((0, 0), (0, missing), (0, 0)))
        d_states = (*d_states[:-1], of_ends)
    else:
        d_states, dq = pull_apart(queries, states, d_states, d_logits, chunk=chunk)
    d_gate, d_bias, d_values, d_initial, d_queries = run_backward(
        call,
        gates,
        tuple(_whole_lanes(v, D) for v in values),
        tuple(_padded(h.astype(jnp.float32)) for h in initial),
        _lengths(gate, lengths),
        tuple(_padded(h) for h in states),
        tuple(_padded(d) for d in d_states),
        tuple(_padded(d.astype(jnp.float32)) for d in d_finals),
        reading,
    )
    if queries is not None and d_queries is not None:
        dq = d_queries.reshape(queries.shape)
    d_values = tuple(
        d if d.shape == v.shape else _narrow(d[..., :D], v.shape[2])
        for d, v in zip(d_values, values, strict=True)
    )
    d_initial = tuple(d[..., :D] for d in d_initial)
    if lengths is not None:  # A row without a position ends where it began.
        none = (lengths == 0)[:, None]
        d_initial = tuple(
            d + jnp.where(none, more, 0)
            for d, more in zip(d_initial, d_finals, strict=True)
        )
    d_bias = None if d_bias is None else d_bias[:D]
    return as_given(gate, d_gate[..., :D], d_bias), d_values, d_initial, dq


def _cut(gate, values, starts, lengths, queries, chunk, interpret, blocks):
    """Returns (how the call is cut, what its kernels read of the gate)."""
    B, T, D = gate.shape
    whole = D + -D % LANES
    tiles = _tiles(gate, values, starts, lengths, queries, chunk, blocks)
    period = chunk if tiles.linked and chunk is not None and chunk < T else None
    resets, bias = find_resets(T, starts, period), bias_of(gate)
    call = Call(
        B=B,
        T=T,
        D=whole,
        widths=tuple(whole if v.shape[2] % LANES else v.shape[2] for v in values),
        logits=bias is not None,
        resets=0 if resets is None else len(resets),
        tiles=tiles,
        head=_head_read(queries, gate, values[-1], tiles),
        interpret=interpret,
    )
    inputs = GateInputs(
        gate=_padded(array_of(gate)),
        bias=() if bias is None else (_padded(bias[None]),),
        resets=() if resets is None else (_over_lanes(resets),),
    )
    return call, inputs


def _tiles(gate, values, starts, lengths, queries, chunk, blocks) -> Tiles:
    _, T, D = gate.shape
    arrays = (gate, values, starts, lengths, queries)
    blocks = choose("mosaic_tpu", *arrays, chunk=chunk, blocks=blocks)
    sizes = {"T": T, "D": D + -D % LANES, "streams": len(values), "chunk": chunk}
    return choose_tiles(**sizes, blocks=blocks)


def _head_read(queries, gate, keys, tiles: Tiles) -> int:
    """Returns E where the kernels read for the queries; 0: they are read apart."""
    # The ends that kernels see are those of stretches; heads are lanes of one register.
    head, D = head_of(queries), gate.shape[2]
    whole = D % LANES == 0 and keys.shape[2] % LANES == 0
    if tiles.linked or not head or not whole or D // head > LANES:
        return 0
    return head


def _flat(queries):
    return queries.reshape(*queries.shape[:2], -1)


def _over_lanes(resets):
    """Gives each position a register's lanes: 1 where its state is reset."""
    # A sixteenth of a gate of 2048 channels. [B, T] would have to be turned on chip.
    narrow = resets[..., None].astype(jnp.bfloat16)
    return jnp.broadcast_to(narrow, (*resets.shape, LANES))


def _lengths(gate, lengths):
    B, T, _ = gate.shape
    return jnp.full(B, T, jnp.int32) if lengths is None else lengths.astype(jnp.int32)


def _whole_lanes(v, D: int):
    """Tiles a stream of odd width to D channels, and those to whole registers."""
    if v.shape[2] % LANES == 0:
        return v
    return _padded(jnp.tile(v, (1, 1, D // v.shape[2])))


def _narrow(wide, width: int):
    """Sums a gradient over the tiles of its stream."""
    tiles = wide.reshape(*wide.shape[:-1], -1, width)
    return jnp.sum(tiles, axis=-2, dtype=jnp.float32)


def _padded(x):
    """Pads the channels to whole registers."""
    missing = -x.shape[-1] % LANES
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
