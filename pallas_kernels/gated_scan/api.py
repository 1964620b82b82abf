"""The op: one gate's linear recurrence over several streams of values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_scan import mesh_layout, mosaic_tpu, triton, xla
from pallas_kernels.gated_scan.inputs import GateLogits

Array = jax.Array

OP = dispatch.Op(
    name="gated_scan",
    backends={"triton": triton, "mosaic_tpu": mosaic_tpu, "xla": xla},
    find_cut=mesh_layout.find_cut,
    specs=mesh_layout.specs,
    outputs=2,
    kept=(0,),  # The states.
)


class Scanned(NamedTuple):
    """What the recurrence gives, one entry for each stream of values.

    Attributes:
      states: h, each in its stream's dtype.
      finals: h after the row's last position, in at least float32.
    """

    states: tuple[Float[Array, "B T D"], ...]
    finals: tuple[Float[Array, "B D"], ...]


def gated_scan(
    gate: Float[Array, "B T D"] | GateLogits,
    values: tuple[Float[Array, "B T _"], ...],
    *,
    initial: tuple[Float[Array, "B D"], ...] | None = None,
    starts: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    chunk: int | None = None,
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
      implementation: a backend, which then runs or raises; None: the first that can.

    Raises:
      ValueError: shapes disagree, or chunk < 1.
      NotImplementedError: the named backend cannot.
    """
    _check(gate, values, initial, starts, lengths, chunk)
    if initial is None:
        dtype = jnp.promote_types(gate.dtype, jnp.float32)
        zeros = jnp.zeros((gate.shape[0], gate.shape[2]), dtype)
        initial = tuple(zeros for _ in values)
    arrays = (gate, tuple(values), tuple(initial), starts, lengths)
    return Scanned(
        *dispatch.run(OP, arrays, implementation=implementation, chunk=chunk)
    )


def _check(gate, values, initial, starts, lengths, chunk) -> None:
    B, T, D = gate.shape
    if T < 1 or not values:
        raise ValueError(
            f"gated_scan: wants at least one position and one stream of values, got "
            f"{T} and {len(values)}"
        )
    for v in values:
        if v.shape[:2] != (B, T) or v.shape[2] < 1 or D % v.shape[2]:
            raise ValueError(
                f"gated_scan: wants values of shape {(B, T)} and a width that divides "
                f"{D}, got {v.shape}"
            )
    if isinstance(gate, GateLogits):
        dispatch.check_shapes("gated_scan", {"bias": (gate.bias, (D,))})
    if initial is not None and [h.shape for h in initial] != [(B, D)] * len(values):
        raise ValueError(
            f"gated_scan: wants {len(values)} initial states of shape {(B, D)}, got "
            f"{[h.shape for h in initial]}"
        )
    dispatch.check_shapes(
        "gated_scan", {"starts": (starts, (B, T)), "lengths": (lengths, (B,))}
    )
    if chunk is not None and chunk < 1:
        raise ValueError(f"gated_scan: wants chunk of at least 1, got {chunk}")
