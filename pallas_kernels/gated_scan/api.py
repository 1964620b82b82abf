"""The op: one gate's linear recurrence over several streams of values."""

from dataclasses import replace
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_scan import mesh_layout, mosaic_tpu, triton, xla
from pallas_kernels.gated_scan.block_sizes import BlockSizes
from pallas_kernels.gated_scan.inputs import GateLogits

Array = jax.Array

OP = dispatch.Op(
    name="gated_scan",
    backends={"triton": triton, "mosaic_tpu": mosaic_tpu, "xla": xla},
    find_cut=mesh_layout.find_cut,
    specs=mesh_layout.specs,
    outputs=3,  # States, finals, logits.
    kept=(3,),  # All states of every stream.
    spares=True,
)
_QUERIED = replace(OP, name="queried_scan")
"""The same, as callers of the other function know it."""


class Scanned(NamedTuple):
    """What the recurrence gives, one entry for each stream of values.

    Attributes:
      states: h, each in its stream's dtype.
      finals: h after the row's last position, in at least float32.
    """

    states: tuple[Float[Array, "B T D"], ...]
    finals: tuple[Float[Array, "B D"], ...]


class Queried(NamedTuple):
    """What the recurrence gives of values, and of keys that queries read.

    Attributes:
      values: h of the values, in their dtype.
      ends: h of the keys at the ends of chunks, in their dtype.
      logits: q[t, h mod N] . h[t] over the channels of head h, in at least float32.
      finals: h of values and keys after the row's last position, likewise.
    """

    values: Float[Array, "B T D"]
    ends: Float[Array, "B G D"]
    logits: Float[Array, "B T H"]
    finals: tuple[Float[Array, "B D"], Float[Array, "B D"]]


def gated_scan(
    gate: Float[Array, "B T D"] | GateLogits,
    values: tuple[Float[Array, "B T _"], ...],
    *,
    initial: tuple[Float[Array, "B D"], ...] | None = None,
    starts: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    chunk: int | None = None,
    blocks: BlockSizes | None = None,
    implementation: Implementation | None = None,
) -> Scanned:
    """Computes h[t] = g[t] h[t-1] + (1 - g[t]) v[t] for every stream v of `values`.

    A stream of W < D channels is tiled: channel d reads v[t, d mod W]. The state is at
    least float32. Source: Feng et al. 2024, "Were RNNs all we needed?"; RAT, eq. (3).
    Differentiable in gate, values and initial.

    Args:
      gate: g, in [0, 1], or its logits and bias, which cross memory in their dtype.
        Where it is 1 the state stays: what padding should have (a logit of infinity).
      values: their widths divide D.
      initial: h[-1] of each stream; None: zeros.
      starts: positions before which the state is set to zero (a document begins).
      lengths: how many positions of a row count for `finals`; None: all.
      chunk: C: the state is also set to zero before positions C, 2 C, ... None: never.
      blocks: how kernels cut the call; what is None they choose. Without it sizes
        measured on this device are taken, if RECURJAX_TILES names a file of them
        (`measured_sizes.py`).
      implementation: a backend, which then runs or raises; None: the first that can.

    Raises:
      ValueError: shapes disagree, or chunk < 1.
      NotImplementedError: the named backend cannot.
    """
    streams = {f"values[{n}]": v for n, v in enumerate(values)}
    _check(OP.name, gate, streams, initial, starts, lengths, chunk)
    lengths = _within(lengths, gate.shape[1])
    initial = _zeros(gate, len(values)) if initial is None else tuple(initial)
    arrays = (gate, tuple(values), initial, starts, lengths, None)
    states, finals, _ = dispatch.run(
        OP, arrays, implementation=implementation, chunk=chunk, blocks=blocks
    )
    return Scanned(states, finals)


def queried_scan(
    gate: Float[Array, "B T D"] | GateLogits,
    values: Float[Array, "B T _"],
    keys: Float[Array, "B T W"],
    queries: Float[Array, "B T N E"],
    *,
    chunk: int,
    initial: tuple[Float[Array, "B D"], Float[Array, "B D"]] | None = None,
    starts: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    blocks: BlockSizes | None = None,
    implementation: Implementation | None = None,
) -> Queried:
    """Scans values and keys by one gate; each position's queries read its own key.

    As `gated_scan` of (values, keys), but where a position's key serves only its own
    logits, and others see the ends of chunks alone: then, where a kernel reads the
    keys, no other state of theirs crosses memory in inference, and no gradient of one
    in training. Source: the RAT paper, eqs. (3) to (5). Differentiable in gate, values,
    keys, queries and initial.

    Args:
      keys: W = N E channels, a group of E for all heads h with the same h mod N.
      queries: of each group.
      chunk: C, which divides T: both states are set to zero before C, 2 C, ...
      initial, starts, lengths, blocks, implementation: see `gated_scan`.

    Raises:
      ValueError: shapes disagree, or chunk does not divide T.
      NotImplementedError: the named backend cannot.
    """
    op, both = _QUERIED.name, {"values": values, "keys": keys}
    _check(op, gate, both, initial, starts, lengths, chunk)
    B, T, _ = gate.shape
    if (
        queries.ndim != 4
        or queries.shape[:2] != (B, T)
        or prod(queries.shape[2:]) != keys.shape[2]
    ):
        raise ValueError(
            f"{op}: wants queries [{B}, {T}, N, E] with N E the {keys.shape[2]} "
            f"channels of the keys, got {queries.shape}"
        )
    dispatch.check_kinds(op, floating={"queries": queries})
    if chunk is None or T % chunk:
        raise ValueError(f"{op}: wants whole chunks of {chunk}, got {T} positions")
    lengths = _within(lengths, T)
    first = _zeros(gate, 2) if initial is None else tuple(initial)
    arrays = (gate, (values, keys), first, starts, lengths, queries)
    (values, ends), finals, logits = dispatch.run(
        _QUERIED, arrays, implementation=implementation, chunk=chunk, blocks=blocks
    )
    return Queried(values, ends, logits, finals)


def _zeros(gate, streams: int) -> tuple[Array, ...]:
    dtype = jnp.promote_types(gate.dtype, jnp.float32)
    return (jnp.zeros((gate.shape[0], gate.shape[2]), dtype),) * streams


def _within(lengths: Array | None, T: int) -> Array | None:
    return None if lengths is None else jnp.clip(lengths, 0, T)


def _check(op, gate, streams, initial, starts, lengths, chunk) -> None:
    if len(gate.shape) != 3 or 0 in gate.shape:
        raise ValueError(f"{op}: wants a gate [B, T, D] of 1 or more, got {gate.shape}")
    B, T, D = gate.shape
    if not streams:
        raise ValueError(f"{op}: wants at least one stream of values")
    for name, v in streams.items():
        if v.shape[:2] != (B, T) or v.shape[2] < 1 or D % v.shape[2]:
            raise ValueError(
                f"{op}: wants {name} of shape {(B, T)} and a width that divides "
                f"{D}, got {v.shape}"
            )
    if isinstance(gate, GateLogits):
        dispatch.check_shapes(op, {"bias": (gate.bias, (D,))})
    if initial is not None and [h.shape for h in initial] != [(B, D)] * len(streams):
        raise ValueError(
            f"{op}: wants {len(streams)} initial states of shape {(B, D)}, got "
            f"{[h.shape for h in initial]}"
        )
    dispatch.check_shapes(op, {"starts": (starts, (B, T)), "lengths": (lengths, (B,))})
    states = {f"initial[{n}]": h for n, h in enumerate(initial or ())}
    gates = {"gate": gate}
    if isinstance(gate, GateLogits):
        gates = {"gate.logits": gate.logits, "bias": gate.bias}
    dispatch.check_kinds(
        op,
        floating=gates | dict(streams) | states,
        whole={"lengths": lengths},
        truth={"starts": starts},
    )
    if chunk is not None and chunk < 1:
        raise ValueError(f"{op}: wants chunk of at least 1, got {chunk}")
