"""The op: a diagonal state space; its step and its weights vary with the position."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from pallas_kernels import dispatch, mesh_cut
from pallas_kernels.dispatch import Implementation, Specs
from pallas_kernels.mesh_cut import Cut
from pallas_kernels.selective_scan.call import (
    BlockSizes,
    SelectiveScanCall,
    SelectiveScanOptions,
    SelectiveScanOutputs,
)

Array = jax.Array

CHUNK = 16
"""Positions between two kept states: fewer cost memory, more are computed again."""
_NO_STEP = -1e30
"""Of dt at padding: softplus of it is exactly 0, which leaves the state as it is."""


def selective_scan(
    u: Float[Array, "B T I"],
    dt: Float[Array, "B T I"],
    a: Float[Array, "I N"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    *,
    skip: Float[Array, " I"] | None = None,
    z: Float[Array, "B T I"] | None = None,
    dt_bias: Float[Array, " I"] | None = None,
    initial: Float[Array, "B I N"] | None = None,
    starts: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    chunk: int = CHUNK,
    blocks: BlockSizes | None = None,
    implementation: Implementation | None = None,
) -> SelectiveScanOutputs:
    """Computes y[t] = C[t] . h[t] + D u[t], h[t] = exp(s[t] A) h[t-1] + s[t] B[t] u[t].

    For every channel of I and each of its N states, with the step
    s[t] = softplus(dt[t] + dt_bias); then y *= silu(z). The state is at least float32.
    Source: Gu and Dao 2023 (Mamba), algorithm 2, with its own simpler B (Euler's).
    Differentiable in every floating argument; the gradient keeps the states of every
    `chunk`-th position only and computes the others again.

    Args:
      u: what enters.
      dt: the step before bias and softplus, or the step itself without `dt_bias`.
      a: A, below zero where the state should decay.
      b, c: input and output weights, shared by all channels.
      skip: D; None: nothing passes by the state.
      z: the gate; None: y as it is.
      dt_bias: None also leaves out the softplus.
      initial: h[-1]; None: zeros.
      starts: positions before which the state is set to zero (a document begins).
      lengths: how many positions of a row are real; the others, on the right, leave
        the state as it is, and their y has no meaning. None: all.
      chunk: in positions; changes memory and time, not the result.
      blocks: how kernels cut the call apart from that; None: they choose.
      implementation: a backend, which then runs or raises; None: the first that can.

    Raises:
      ValueError: shapes disagree, or chunk < 1.
      NotImplementedError: the named backend cannot.
    """
    _check(u, dt, a, b, c, skip, z, dt_bias, initial, starts, lengths, chunk)
    B, T, I = u.shape
    if initial is None:
        dtype = jnp.promote_types(u.dtype, jnp.float32)
        initial = jnp.zeros((B, I, a.shape[1]), dtype)
    if lengths is not None:
        # A step of 0 is not a step, in every backend: none of them knows of lengths.
        real = jnp.arange(T) < lengths[:, None]
        dt = jnp.where(real[..., None], dt, 0 if dt_bias is None else _NO_STEP)
        starts = None if starts is None else starts & real
    options = SelectiveScanOptions(chunk=chunk, blocks=blocks or BlockSizes())
    call = SelectiveScanCall(u, dt, a, b, c, skip, z, dt_bias, initial, starts, options)
    return dispatch.run(OP, call, implementation=implementation)


def find_cut(call: SelectiveScanCall) -> Cut | None:
    """Returns how the mesh that is set cuts the call by rows and channels, or None."""
    B, _, I = call.u.shape
    return mesh_cut.find_cut(B, lambda devices: I % devices == 0)


def specs(cut: Cut, call: SelectiveScanCall, backend: str) -> Specs:
    """Returns how the call and any backend's results are sharded.

    b and c are shared by the channels, a, skip and dt_bias by the rows: devices that
    share an array each make a part of its gradient, and the frame sums the parts.
    """
    del backend
    rows, channels = cut.by_row, cut.columns
    wide: Any = P(rows, None, channels)
    state: Any = P(rows, channels)
    by_row, by_channel = P(rows), P(channels)
    of_call = call._replace(
        u=wide,
        dt=wide,
        a=by_channel,
        b=by_row,
        c=by_row,
        skip=None if call.skip is None else by_channel,
        z=None if call.z is None else wide,
        dt_bias=None if call.dt_bias is None else by_channel,
        initial=state,
        starts=None if call.starts is None else by_row,
    )
    # The states that enter chunks have the loops' layout: [B, chunks, N, I].
    return Specs(
        of_call, SelectiveScanOutputs(wide, state), P(rows, None, None, channels)
    )


OP = dispatch.Op(
    name="selective_scan",
    backends=dispatch.backends_in("pallas_kernels.selective_scan"),
    find_cut=find_cut,
    specs=specs,
)


def _check(u, dt, a, b, c, skip, z, dt_bias, initial, starts, lengths, chunk) -> None:
    if u.ndim != 3 or a.ndim != 2 or 0 in (*u.shape, *a.shape):
        raise ValueError(
            f"selective_scan: needs u of shape [B, T, I] and a of shape [I, N], none "
            f"of them 0, got {u.shape} and {a.shape}"
        )
    (B, T, I), N = u.shape, a.shape[1]
    dispatch.check_shapes(
        "selective_scan",
        {
            "dt": (dt, (B, T, I)),
            "a": (a, (I, N)),
            "b": (b, (B, T, N)),
            "c": (c, (B, T, N)),
            "skip": (skip, (I,)),
            "z": (z, (B, T, I)),
            "dt_bias": (dt_bias, (I,)),
            "initial": (initial, (B, I, N)),
            "starts": (starts, (B, T)),
            "lengths": (lengths, (B,)),
        },
    )
    if chunk < 1:
        raise ValueError(f"selective_scan: needs chunk of at least 1, got {chunk}")
    of_channels = {"u": u, "dt": dt, "a": a, "b": b, "c": c, "skip": skip, "z": z}
    dispatch.check_kinds(
        "selective_scan",
        floating=of_channels | {"dt_bias": dt_bias, "initial": initial},
        integers={"lengths": lengths},
        truth={"starts": starts},
    )
