"""The op: one gate's linear recurrence over several streams of values."""

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from pallas_kernels import dispatch, mesh_cut
from pallas_kernels.dispatch import Implementation, Specs
from pallas_kernels.gated_scan.call import (
    BlockSizes,
    GatedScanCall,
    GatedScanOptions,
    GateLogits,
    ScanOutputs,
)
from pallas_kernels.mesh_cut import Cut

Array = jax.Array


class GatedScanOutputs(NamedTuple):
    """The results of the recurrence, one entry for each stream of values.

    Attributes:
      states: h, each in its stream's dtype.
      finals: h after the row's last position, in at least float32.
    """

    states: tuple[Float[Array, "B T D"], ...]
    finals: tuple[Float[Array, "B D"], ...]


class QueriedScanOutputs(NamedTuple):
    """The results of the recurrence for values, and for keys that queries read.

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
) -> GatedScanOutputs:
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
      blocks: how kernels cut the call; what is None they choose.
      implementation: a backend, which then runs or raises; None: the first that can.

    Raises:
      ValueError: shapes disagree, or chunk < 1.
      NotImplementedError: the named backend cannot.
    """
    streams = {f"values[{n}]": v for n, v in enumerate(values)}
    _check("gated_scan", gate, streams, initial, starts, lengths, chunk)
    lengths = _within(lengths, gate.shape[1])
    initial = _zeros(gate, len(values)) if initial is None else tuple(initial)
    options = GatedScanOptions(chunk=chunk, blocks=blocks or BlockSizes())
    call = GatedScanCall(gate, tuple(values), initial, starts, lengths, None, options)
    out = dispatch.run(OP, call, implementation=implementation)
    return GatedScanOutputs(out.states, out.finals)


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
) -> QueriedScanOutputs:
    """Scans values and keys by one gate; each position's queries read its own key.

    As `gated_scan` of (values, keys), but where a position's key serves only its own
    logits, and others see the ends of chunks alone: then, where a kernel reads the
    keys, no other state of theirs crosses memory in inference, and no gradient of one
    in training. Source: the RAT paper, eqs. (3) to (5). Differentiable in gate, values,
    keys, queries and initial.

    Args:
      keys: W = N E channels, a group of E for all heads h with the same h mod N.
      queries: queries of each group.
      chunk: C, which divides T: both states are set to zero before C, 2 C, ...
      initial, starts, lengths, blocks, implementation: see `gated_scan`.

    Raises:
      ValueError: shapes disagree, or chunk does not divide T.
      NotImplementedError: the named backend cannot.
    """
    op, both = "queried_scan", {"values": values, "keys": keys}
    _check(op, gate, both, initial, starts, lengths, chunk)
    B, T, _ = gate.shape
    if (
        queries.ndim != 4
        or queries.shape[:2] != (B, T)
        or prod(queries.shape[2:]) != keys.shape[2]
    ):
        raise ValueError(
            f"{op}: needs queries [{B}, {T}, N, E] with N E the {keys.shape[2]} "
            f"channels of the keys, got {queries.shape}"
        )
    dispatch.check_kinds(op, floating={"queries": queries})
    if chunk is None or T % chunk:
        raise ValueError(f"{op}: T must be a multiple of chunk={chunk}, got {T}")
    lengths = _within(lengths, T)
    first = _zeros(gate, 2) if initial is None else tuple(initial)
    options = GatedScanOptions(chunk=chunk, blocks=blocks or BlockSizes())
    call = GatedScanCall(gate, (values, keys), first, starts, lengths, queries, options)
    (values, ends), finals, logits = dispatch.run(
        _QUERIED, call, implementation=implementation
    )
    return QueriedScanOutputs(values, ends, logits, finals)


def _zeros(gate, streams: int) -> tuple[Array, ...]:
    dtype = jnp.promote_types(gate.dtype, jnp.float32)
    return (jnp.zeros((gate.shape[0], gate.shape[2]), dtype),) * streams


def _within(lengths: Array | None, T: int) -> Array | None:
    return None if lengths is None else jnp.clip(lengths, 0, T)


def _check(op, gate, streams, initial, starts, lengths, chunk) -> None:
    if len(gate.shape) != 3 or 0 in gate.shape:
        raise ValueError(f"{op}: needs a gate [B, T, D] of 1 or more, got {gate.shape}")
    B, T, D = gate.shape
    if not streams:
        raise ValueError(f"{op}: needs at least one stream of values")
    for name, v in streams.items():
        if v.shape[:2] != (B, T) or v.shape[2] < 1 or D % v.shape[2]:
            raise ValueError(
                f"{op}: needs {name} of shape {(B, T)} and a width that divides "
                f"{D}, got {v.shape}"
            )
    if isinstance(gate, GateLogits):
        dispatch.check_shapes(op, {"bias": (gate.bias, (D,))})
    if initial is not None and [h.shape for h in initial] != [(B, D)] * len(streams):
        raise ValueError(
            f"{op}: needs {len(streams)} initial states of shape {(B, D)}, got "
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
        integers={"lengths": lengths},
        truth={"starts": starts},
    )
    if chunk is not None and chunk < 1:
        raise ValueError(f"{op}: needs chunk of at least 1, got {chunk}")


def find_cut(call: GatedScanCall) -> Cut | None:
    """Returns how the mesh that is set cuts the call by rows and channels, or None.

    A stream narrower than the gate is tiled over the channels: where channels are cut,
    each device holds all of it.
    """
    B, _, D = call.gate.shape
    widths = [v.shape[2] for v in call.values]
    head = call.head or 1

    def divide(devices: int) -> bool:
        part, rest = divmod(D, devices)
        fits = rest == 0 and part % head == 0
        return fits and all(W == D or part % W == 0 for W in widths)

    return mesh_cut.find_cut(B, divide)


def specs(cut: Cut, call: GatedScanCall, backend: str) -> Specs:
    """Returns how the call and any backend's results are sharded."""
    del backend
    gate, D = call.gate, call.gate.shape[2]
    wide: Any = P(cut.by_row, None, cut.columns)
    state: Any = P(cut.by_row, cut.columns)
    by_row, streams = P(cut.by_row), len(call.values)
    of_gate = wide
    if isinstance(gate, GateLogits):
        of_bias: Any = None if gate.bias is None else P(cut.columns)
        of_gate = GateLogits(wide, of_bias)
    of_values = tuple(wide if v.shape[2] == D else by_row for v in call.values)
    read = call.queries is not None
    of_call = call._replace(
        gate=of_gate,
        values=of_values,
        initial=(state,) * streams,
        starts=None if call.starts is None else by_row,
        lengths=None if call.lengths is None else by_row,
        # Queries have the last stream's groups.
        queries=of_values[-1] if read else None,
    )
    wide_states, finals = (wide,) * streams, (state,) * streams
    outputs = ScanOutputs(wide_states, finals, wide if read else None)
    return Specs(of_call, outputs, wide_states)


OP = dispatch.Op(
    name="gated_scan",
    backends=dispatch.backends_in("pallas_kernels.gated_scan"),
    find_cut=find_cut,
    specs=specs,
)
_QUERIED = replace(OP, name="queried_scan")
"""The same, as callers of the other function know it."""
