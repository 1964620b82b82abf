"""The recurrence in parallel over the chunks of a folded sequence, in plain XLA.

A folded array is [B, G, C, ...]: G stretches of C positions. The loop runs over C; one
turn reads a slice [B, G, D] of every input and writes one of every output, so each
array crosses memory once. No stretch sees another: what enters it is an argument.
The state is set to zero where `starts` [B, G, C] says so, and every `period` turns.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

Array = jax.Array


def scan_forward(
    gate: Float[Array, "B G C D"],
    values: tuple[Float[Array, "B G C _"], ...],
    starts: Bool[Array, "B G C"] | None,
    entering: tuple[Float[Array, "B G D"], ...],
    *,
    period: int | None = None,
):
    """Returns (states [B, G, C, D] of each stream, its last states [B, G, D]).

    Args:
      gate: [B, G, C, D].
      values: [B, G, C, W] each.
      entering: [B, G, D] of each stream, in the dtype of the computation.
    """
    dtype = entering[0].dtype

    def body(c, carry):
        states, outputs = carry
        g = _at(gate, c).astype(dtype)
        keep = _unless(_restarts(starts, c, period), g)
        states = tuple(
            keep * h + spread(1 - g, _at(v, c).astype(dtype))
            for h, v in zip(states, values, strict=True)
        )
        outputs = tuple(_put(out, h, c) for out, h in zip(outputs, states, strict=True))
        return states, outputs

    empty = tuple(jnp.zeros(gate.shape, v.dtype) for v in values)
    last, states = _loop(body, gate.shape[2], (tuple(entering), empty))
    return states, last


def scan_backward(
    gate: Float[Array, "B G C D"],
    values: tuple[Float[Array, "B G C _"], ...],
    starts: Bool[Array, "B G C"] | None,
    entering: tuple[Float[Array, "B G D"], ...],
    states: tuple[Float[Array, "B G C D"], ...],
    d_states: tuple[Float[Array, "B G C D"], ...],
    d_last: tuple[Float[Array, "B G D"], ...],
    *,
    period: int | None = None,
):
    """Returns gradients of (gate, values, entering), all in the computation's dtype.

    The loop runs l[t] = dh[t] + g[t+1] l[t+1], the gradient of h[t], and no more: the
    gradients of gate and values follow from all l at once.
    """
    dtype = entering[0].dtype
    C = gate.shape[2]

    def body(turn, carry):
        flowing, outputs = carry
        c = C - 1 - turn
        keep = _unless(_restarts(starts, c, period), _at(gate, c).astype(dtype))
        totals = tuple(
            u + _at(dh, c).astype(dtype)
            for u, dh in zip(flowing, d_states, strict=True)
        )
        outputs = tuple(_put(out, h, c) for out, h in zip(outputs, totals, strict=True))
        return tuple(keep * total for total in totals), outputs

    empty = tuple(jnp.zeros(gate.shape, dtype) for _ in values)
    d_entering, totals = _loop(body, C, (tuple(d_last), empty))
    d_keep = d_new = jnp.zeros(gate.shape, dtype)
    d_values = []
    for total, h, h_in, v in zip(totals, states, entering, values, strict=True):
        before = jnp.concatenate([h_in[:, :, None], h[:, :, :-1].astype(dtype)], axis=2)
        d_keep += total * before
        d_new += spread(total, v.astype(dtype))
        d_values.append(gather((1 - gate.astype(dtype)) * total, v.shape[-1]))
    d_gate = _unless(_all_restarts(starts, C, period), d_keep) - d_new
    return d_gate, tuple(d_values), d_entering


def summarize_forward(
    gate: Float[Array, "B G C D"],
    values: tuple[Float[Array, "B G C _"], ...],
    starts: Bool[Array, "B G C"] | None,
    dtype,
):
    """Returns what a stretch makes of h: h_last = product h_in + added, [B, G, D]."""
    B, G, C, D = gate.shape

    def body(c, carry):
        product, added = carry
        g = _at(gate, c).astype(dtype)
        keep = _unless(_restarts(starts, c, None), g)
        added = tuple(
            keep * h + spread(1 - g, _at(v, c).astype(dtype))
            for h, v in zip(added, values, strict=True)
        )
        return keep * product, added

    zeros = jnp.zeros((B, G, D), dtype)
    return _loop(body, C, (zeros + 1, tuple(zeros for _ in values)))


def summarize_backward(
    gate: Float[Array, "B G C D"],
    starts: Bool[Array, "B G C"] | None,
    d_states: tuple[Float[Array, "B G C D"], ...],
    dtype,
):
    """Returns what a stretch makes of l: l_in = product l_last + added, [B, G, D]."""
    B, G, C, D = gate.shape

    def body(turn, carry):
        product, added = carry
        c = C - 1 - turn
        g = _at(gate, c).astype(dtype)
        keep = _unless(_restarts(starts, c, None), g)
        added = tuple(
            keep * (u + _at(dh, c).astype(dtype))
            for u, dh in zip(added, d_states, strict=True)
        )
        return keep * product, added

    zeros = jnp.zeros((B, G, D), dtype)
    return _loop(body, C, (zeros + 1, tuple(zeros for _ in d_states)))


def spread(wide: Array, narrow: Array) -> Array:
    """Multiplies [..., D] by [..., W] tiled to D."""
    W = narrow.shape[-1]
    parts = wide.reshape(*wide.shape[:-1], -1, W) * narrow[..., None, :]
    return parts.reshape(wide.shape)


def gather(wide: Array, width: int) -> Array:
    """Sums the D / W tiles of [..., D]: the transpose of tiling."""
    tiles = wide.reshape(*wide.shape[:-1], -1, width)
    # Not tiles.sum(-2): on CPU a sum of slices joins the arithmetic around it.
    total = tiles[..., 0, :]
    for tile in range(1, tiles.shape[-2]):
        total = total + tiles[..., tile, :]
    return total


def _restarts(starts: Array | None, c: Array, period: int | None) -> Array | None:
    here = None if starts is None else _at(starts, c)[..., None]
    if period is None:
        return here
    regular = (c > 0) & (c % period == 0)
    return regular if here is None else here | regular


def _all_restarts(starts: Array | None, C: int, period: int | None) -> Array | None:
    """Returns what `_restarts` says of every c: [#B, #G, C, 1], or None for nowhere."""
    here = None if starts is None else starts[..., None]
    if period is None:
        return here
    c = jnp.arange(C)[:, None]
    regular = ((c > 0) & (c % period == 0))[None, None]
    return regular if here is None else here | regular


def _unless(restarts: Array | None, x: Array) -> Array:
    return x if restarts is None else jnp.where(restarts, 0, x)


def _at(folded: Array, c: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(folded, c, axis=2, keepdims=False)


def _put(folded: Array, part: Array, c: Array) -> Array:
    part = part.astype(folded.dtype)
    return jax.lax.dynamic_update_index_in_dim(folded, part, c, axis=2)


def _loop(body, turns: int, carry):
    return jax.lax.fori_loop(0, turns, body, carry)
