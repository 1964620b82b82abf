"""The XLA backend: a loop over positions, and over chunks of them for the gradient.

Everything without a past (softplus, the gate, D u) is computed for all positions at
once around the loop. The loop's state is [B, N, I]: channels lie along the vectors.
A turn of it costs a few microseconds on a CPU, most of it for exp.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from pallas_kernels import target
from pallas_kernels.selective_scan.block_sizes import BlockSizes, choose

Array = jax.Array

_UNROLL = 8
"""Positions in a turn of the loop on a GPU or TPU, where a turn costs launches."""


def supported(
    u, dt, a, b, c, skip, z, dt_bias, initial, starts, *, chunk, blocks=None
) -> str | None:
    """Returns which size it has no use for; it does everything else."""
    del dt, b, c, skip, z, dt_bias, initial
    blocks = choose("xla", u, a, starts, chunk=chunk, blocks=blocks)
    return blocks.refusal_beyond("unroll")


def forward(
    u: Float[Array, "B T I"],
    dt: Float[Array, "B T I"],
    a: Float[Array, "I N"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    skip: Float[Array, " I"] | None,
    z: Float[Array, "B T I"] | None,
    dt_bias: Float[Array, " I"] | None,
    initial: Float[Array, "B I N"],
    starts: Bool[Array, "B T"] | None,
    *,
    chunk: int,
    residuals: bool,
    blocks: BlockSizes | None = None,
):
    """Returns (y, final, states [B, G, N, I] that enter chunks) or None for these."""
    T = u.shape[1]
    blocks = choose("xla", u, a, starts, chunk=chunk, blocks=blocks)
    walked = chunk if residuals else T
    steps = _Steps.of(u, dt, a, b, c, dt_bias, starts, walked, blocks.unroll)

    def position(t, carry):
        h, y = carry
        h = steps.advance(h, steps.decay(t), t)
        return h, _put(y, _over_states(h, _at(steps.c, t)), t)

    def one_chunk(g, carry):
        h, y, kept = carry
        kept = _put(kept, h, g)
        h, y = steps.walk(g, position, (h, y))
        return h, y, kept

    h = initial.swapaxes(1, 2).astype(steps.a.dtype)
    y = jnp.zeros_like(steps.delta)
    if residuals:
        kept = jnp.zeros((h.shape[0], steps.chunks, *h.shape[1:]), h.dtype)
        h, y, kept = jax.lax.fori_loop(0, steps.chunks, one_chunk, (h, y, kept))
    else:
        (h, y), kept = steps.walk(0, position, (h, y)), None
    y = _passed_by(y[:, :T], u, skip)
    if z is not None:
        y = y * jax.nn.silu(z.astype(y.dtype))
    return y.astype(u.dtype), h.swapaxes(1, 2), kept


def backward(
    u: Float[Array, "B T I"],
    dt: Float[Array, "B T I"],
    a: Float[Array, "I N"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    skip: Float[Array, " I"] | None,
    z: Float[Array, "B T I"] | None,
    dt_bias: Float[Array, " I"] | None,
    initial: Float[Array, "B I N"],
    starts: Bool[Array, "B T"] | None,
    kept: Float[Array, "B G N I"],
    d_out: Float[Array, "B T I"],
    d_final: Float[Array, "B I N"],
    *,
    chunk: int,
    blocks: BlockSizes | None = None,
):
    """Returns gradients of the arrays before `starts`, None for those not given.

    With g[t] the gradient of h[t], from the last position to the first:
    g[t] = dy[t] C[t] + exp(s[t+1] A) g[t+1]; the others are sums over g and h.
    """
    T, dtype = u.shape[1], kept.dtype
    wide = u.astype(dtype)
    # The gate z multiplies what the state and the skip gave: its own gradient needs
    # that sum again, which the loop makes as y.
    dy = d_out = d_out.astype(dtype)
    if z is not None:
        sigmoid = jax.nn.sigmoid(z.astype(dtype))
        dy = d_out * z * sigmoid
    blocks = choose("xla", u, a, starts, chunk=chunk, blocks=blocks)
    steps = _Steps.of(u, dt, a, b, c, dt_bias, starts, chunk, blocks.unroll)
    dh, da, sums = _reverse(steps, kept, dy, d_final.swapaxes(1, 2).astype(dtype))
    # What remains needs no loop: the step s enters through the input s u and the
    # exponent.
    of_input, of_step, db, dc, y = (x[:, :T] for x in sums)
    du = steps.delta[:, :T] * of_input
    d_delta = wide * of_input + of_step
    d_skip = dz = d_bias = None
    if skip is not None:
        du = du + dy * skip.astype(dtype)
        d_skip = jnp.sum(dy * wide, axis=(0, 1))
    if z is not None:
        slope = sigmoid * (1 + z * (1 - sigmoid))
        dz = d_out * _passed_by(y, u, skip) * slope
    ddt = d_delta
    if dt_bias is not None:
        ddt = d_delta * jax.nn.sigmoid(dt.astype(dtype) + dt_bias.astype(dtype))
        d_bias = jnp.sum(ddt, axis=(0, 1))
    da = jnp.sum(da, axis=0).T
    return du, ddt, da, db, dc, d_skip, dz, d_bias, dh.swapaxes(1, 2)


class _Steps(NamedTuple):
    """What the loops read, positions padded to whole chunks: there the step is 0.

    Attributes:
      delta: s, [B, T, I].
      inputs: s u, [B, T, I].
      a: [N, I].
      b, c: [B, T, N].
      keep: 0 where a document starts, else 1, [B, T]; None: it is 1 everywhere.
      chunk: C, in positions.
      unroll: of them, in a turn of a loop.
    """

    delta: Array
    inputs: Array
    a: Array
    b: Array
    c: Array
    keep: Array | None
    chunk: int
    unroll: int

    @classmethod
    def of(
        cls, u, dt, a, b, c, dt_bias, starts, chunk: int, unroll: int | None
    ) -> "_Steps":
        """Lays them out; an unroll of None is the heuristic's."""
        dtype = jnp.promote_types(u.dtype, jnp.float32)
        T = u.shape[1]
        chunk = min(chunk, T)

        def padded(x: Array) -> Array:
            missing = (0, -T % chunk)
            x = x.astype(dtype)
            return jnp.pad(x, ((0, 0), missing, *[(0, 0)] * (x.ndim - 2)))

        # A step of 0 changes no state and adds nothing, so padding needs no mask.
        delta = dt.astype(dtype)
        if dt_bias is not None:
            delta = jax.nn.softplus(delta + dt_bias.astype(dtype))
        inputs = padded(delta * u)
        # starts are padded with 0: the last state passes through the padding.
        keep = None if starts is None else 1 - padded(starts)
        arrays = (padded(delta), inputs, a.astype(dtype).T, padded(b), padded(c), keep)
        if unroll is None:
            unroll = 1 if target.current().platform == "cpu" else _UNROLL
        return cls(*arrays, chunk, min(unroll, chunk))

    @property
    def chunks(self) -> int:
        return self.delta.shape[1] // self.chunk

    def decay(self, t) -> Array:
        """Returns what is left of the state before, [B, N, I]."""
        decay = jnp.exp(_at(self.delta, t)[:, None] * self.a)
        if self.keep is None:
            return decay
        return decay * _at(self.keep, t)[:, None, None]

    def advance(self, h: Array, decay: Array, t) -> Array:
        """Returns the state after position t."""
        return decay * h + _at(self.b, t)[:, :, None] * _at(self.inputs, t)[:, None]

    def walk(self, g, position, carry, *, reverse: bool = False):
        """Runs `position` over chunk g, from its last position if `reverse`."""
        C = self.chunk

        def turn(s, carry):
            return position(g * C + (C - 1 - s if reverse else s), carry)

        return jax.lax.fori_loop(0, C, turn, carry, unroll=self.unroll)


def _reverse(steps: _Steps, kept: Array, dy: Array, d_final: Array):
    """Returns (gradient of the initial state, of a [B, N, I], five sums).

    The sums, for each position: over n, g B [B, T, I], which is the gradient of s u;
    the step's gradient through exp [B, T, I]; over i, those of B and C [B, T, N]; and
    y once more [B, T, I], as the state gives it.
    """
    B, padded, I = steps.delta.shape
    N, C = kept.shape[2], steps.chunk
    dy = jnp.pad(dy, ((0, 0), (0, padded - dy.shape[1]), (0, 0)))
    zeros, narrow = jnp.zeros_like(steps.delta), jnp.zeros_like(steps.b)
    # A sum over n with weights of 1 takes the fast path of `_over_states` too.
    ones = jnp.ones((B, N), dy.dtype)
    states = jnp.zeros((B, C, N, I), dy.dtype)

    def one_chunk(turn, carry):
        g = steps.chunks - 1 - turn
        dh, da, (of_input, of_step, db, dc, y) = carry

        # First forward: the chunk's states again, and what needs nothing else.
        def again(t, carry):
            h, before, decays, y, dc = carry
            decay = steps.decay(t)
            before, decays = _put(before, h, t % C), _put(decays, decay, t % C)
            h = steps.advance(h, decay, t)
            y = _put(y, _over_states(h, _at(steps.c, t)), t)
            dc = _put(dc, _over_channels(h, _at(dy, t)), t)
            return h, before, decays, y, dc

        start = (_at(kept, g), states, states, y, dc)
        _, before, decays, y, dc = steps.walk(g, again, start)

        # Then back: g, and what is left of it for the state before.
        def back(t, carry):
            dh, da, of_input, of_step, db = carry
            gradient = dh + _at(steps.c, t)[:, :, None] * _at(dy, t)[:, None]
            dh = _at(decays, t % C) * gradient
            # h' = exp(s a) h + ...: the exponent's gradient is dh exp(s a) h, shared by
            # s and a.
            of_exponent = dh * _at(before, t % C)
            da = da + of_exponent * _at(steps.delta, t)[:, None]
            of_step = _put(of_step, _over_states(of_exponent * steps.a, ones), t)
            of_input = _put(of_input, _over_states(gradient, _at(steps.b, t)), t)
            db = _put(db, _over_channels(gradient, _at(steps.inputs, t)), t)
            return dh, da, of_input, of_step, db

        start = (dh, da, of_input, of_step, db)
        dh, da, *sums = steps.walk(g, back, start, reverse=True)
        return dh, da, (*sums, dc, y)

    start = (
        d_final,
        jnp.zeros((B, N, I), dy.dtype),
        (zeros, zeros, narrow, narrow, zeros),
    )
    return jax.lax.fori_loop(0, steps.chunks, one_chunk, start)


def _over_states(h: Array, weights: Array) -> Array:
    """Sums h [B, N, I] over n with weights [B, N].

    On a CPU a dot is five times as fast as a product and a sum.
    """
    return jnp.einsum("bni,bn->bi", h, weights, precision=jax.lax.Precision.HIGHEST)


def _over_channels(h: Array, weights: Array) -> Array:
    """Sums h [B, N, I] over i with weights [B, I]."""
    return jnp.einsum("bni,bi->bn", h, weights, precision=jax.lax.Precision.HIGHEST)


def _passed_by(y: Array, u: Array, skip: Array | None) -> Array:
    return y if skip is None else y + skip.astype(y.dtype) * u


def _at(x: Array, t) -> Array:
    return jax.lax.dynamic_index_in_dim(x, t, axis=1, keepdims=False)


def _put(x: Array, part: Array, t) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, t, axis=1)
