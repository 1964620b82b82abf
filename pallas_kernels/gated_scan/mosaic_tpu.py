"""TPU path: one kernel a pass, the state in VMEM from block to block."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from pallas_kernels.dispatch import refusal_of_one_position
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
    Call,
    GateInputs,
    Tiles,
    choose_tiles,
    refusal_of_channels,
)
from pallas_kernels.target import refusal_of_mosaic_tpu

Array = jax.Array


def supported(gate, *arrays, chunk) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    reason = refusal_of_mosaic_tpu() or refusal_of_one_position(array_of(gate))
    return reason or expressible(gate, *arrays, chunk=chunk)


def expressible(gate, values, initial, starts, lengths, *, chunk) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    D = gate.shape[2] + -gate.shape[2] % LANES
    return refusal_of_channels(D, len(values)) or refusal_of_streams(gate, values)


def forward(
    gate: Float[Array, "B T D"] | GateLogits,
    values: tuple[Float[Array, "B T _"], ...],
    initial: tuple[Float[Array, "B D"], ...],
    starts: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
    *,
    chunk: int | None,
    interpret: Any = False,
    tiles: Tiles | None = None,
):
    """Returns (states, finals): see `gated_scan`.

    Args:
      interpret: False, True, or pltpu.InterpretParams for the TPU's own semantics.
      tiles: how the call is cut; None: the heuristic's.
    """
    D = gate.shape[2]
    call, gates = _cut(gate, values, starts, chunk, interpret, tiles)
    states, finals = run_forward(
        call,
        gates,
        tuple(_whole_lanes(v, D) for v in values),
        tuple(_padded(h.astype(jnp.float32)) for h in initial),
        _lengths(gate, lengths),
    )
    return tuple(h[..., :D] for h in states), tuple(h[..., :D] for h in finals)


def backward(
    gate: Float[Array, "B T D"] | GateLogits,
    values: tuple[Float[Array, "B T _"], ...],
    initial: tuple[Float[Array, "B D"], ...],
    starts: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
    states: tuple[Float[Array, "B T D"], ...],
    d_states: tuple[Float[Array, "B T D"], ...],
    d_finals: tuple[Float[Array, "B D"], ...],
    *,
    chunk: int | None,
    interpret: Any = False,
    tiles: Tiles | None = None,
):
    """Returns gradients of (gate, values, initial)."""
    D = gate.shape[2]
    call, gates = _cut(gate, values, starts, chunk, interpret, tiles)
    d_gate, d_bias, d_values, d_initial = run_backward(
        call,
        gates,
        tuple(_whole_lanes(v, D) for v in values),
        tuple(_padded(h.astype(jnp.float32)) for h in initial),
        _lengths(gate, lengths),
        tuple(_padded(h) for h in states),
        tuple(_padded(d) for d in d_states),
        tuple(_padded(d.astype(jnp.float32)) for d in d_finals),
    )
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
    return as_given(gate, d_gate[..., :D], d_bias), d_values, d_initial


def _cut(gate, values, starts, chunk, interpret, tiles: Tiles | None):
    """Returns (how the call is cut, what its kernels read of the gate)."""
    B, T, D = gate.shape
    whole = D + -D % LANES
    if tiles is None:
        tiles = choose_tiles(T=T, D=whole, streams=len(values), chunk=chunk)
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
        interpret=interpret,
    )
    inputs = GateInputs(
        gate=_padded(array_of(gate)),
        bias=() if bias is None else (_padded(bias[None]),),
        resets=() if resets is None else (_over_lanes(resets),),
    )
    return call, inputs


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
