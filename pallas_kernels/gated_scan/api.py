"""The op: one gate's linear recurrence over several streams of values."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from pallas_kernels.gated_scan import mesh_layout, mosaic_tpu, triton, xla

Array = jax.Array
Implementation = Literal["triton", "mosaic_tpu", "xla"]

_BACKENDS = {"triton": triton, "mosaic_tpu": mosaic_tpu, "xla": xla}
"""In order of preference; the last one can do everything."""


class Scanned(NamedTuple):
    """What the recurrence gives, one entry for each stream of values.

    Attributes:
      states: h, each in its stream's dtype.
      finals: h after the row's last position, in at least float32.
    """

    states: tuple[Float[Array, "B T D"], ...]
    finals: tuple[Float[Array, "B D"], ...]


def gated_scan(
    gate: Float[Array, "B T D"],
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
      gate: g, in [0, 1]. Where it is 1 the state stays: what padding should have.
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
    names = list(_BACKENDS) if implementation is None else [implementation]
    reason = None
    for name in names:
        if name not in _BACKENDS:
            raise ValueError(
                f"gated_scan: wants an implementation of {list(_BACKENDS)}, got "
                f"{name!r}"
            )
        # The compiler cuts xla's own operations by itself.
        layout = None if name == "xla" else mesh_layout.layout_of_call(*arrays)
        reason = mesh_layout.refusal(_BACKENDS[name], layout, *arrays, chunk=chunk)
        if reason is None:
            states, finals = _run(name, chunk, layout, *arrays)  # pyright: ignore[reportGeneralTypeIssues]
            return Scanned(states, finals)
    raise NotImplementedError(f"gated_scan: {names[-1]}: {reason}")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(name, chunk, layout, gate, values, initial, starts, lengths) -> Any:
    arrays = (gate, values, initial, starts, lengths)
    return mesh_layout.forward(_BACKENDS[name], layout, *arrays, chunk=chunk)


def _forward(name, chunk, layout, *arrays):
    states, finals = mesh_layout.forward(_BACKENDS[name], layout, *arrays, chunk=chunk)
    return (states, finals), (arrays, states)


def _backward(name, chunk, layout, kept, cotangents):
    arrays, states = kept
    gate, values, initial, starts, lengths = arrays
    for_gate, for_values, for_initial = mesh_layout.backward(
        _BACKENDS[name], layout, *arrays, states, *cotangents, chunk=chunk
    )
    return (
        for_gate.astype(gate.dtype),
        tuple(d.astype(v.dtype) for d, v in zip(for_values, values, strict=True)),
        tuple(d.astype(h.dtype) for d, h in zip(for_initial, initial, strict=True)),
        jax.tree.map(_no_gradient, starts),
        jax.tree.map(_no_gradient, lengths),
    )


_run.defvjp(_forward, _backward)


def _no_gradient(leaf: Array) -> np.ndarray:
    return np.zeros(leaf.shape, jax.dtypes.float0)


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
    if initial is not None and [h.shape for h in initial] != [(B, D)] * len(values):
        raise ValueError(
            f"gated_scan: wants {len(values)} initial states of shape {(B, D)}, got "
            f"{[h.shape for h in initial]}"
        )
    if starts is not None and starts.shape != (B, T):
        raise ValueError(
            f"gated_scan: wants starts of shape {(B, T)}, got {starts.shape}"
        )
    if lengths is not None and lengths.shape != (B,):
        raise ValueError(
            f"gated_scan: wants lengths of shape {(B,)}, got {lengths.shape}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"gated_scan: wants chunk of at least 1, got {chunk}")
