"""The XLA backend: a loop over positions, and over chunks of them for the gradient.

Everything without a past (softplus, the gate, D u) is computed for all positions at
once around the loop. The loop's state is [B, N, I]: channels lie along the vectors.
A turn of it costs a few microseconds on a CPU, most of it for exp.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels import target
from pallas_kernels.selective_scan.call import SelectiveScanCall, SelectiveScanOutputs

Array = jax.Array

_UNROLL = 8
"""Positions in a turn of the loop on a GPU or TPU, where a turn costs launches."""


def supported(call: SelectiveScanCall) -> str | None:
    """Returns which size it has no use for; it does everything else."""
    return call.options.blocks.refusal_beyond("unroll")


def forward(
    call: SelectiveScanCall, *, residuals: bool
) -> tuple[SelectiveScanOutputs, Float[Array, "B G N I"] | None]:
    """Returns (y, final), and the states [B, G, N, I] that enter chunks or None."""
    u, T = call.u, call.u.shape[1]
    steps = _Steps.of(call, call.options.chunk if residuals else T)

    def position(t, carry):
        h, y = carry
        h = steps.advance(h, steps.decay(t), t)
        return h, _put(y, _over_states(h, _at(steps.c, t)), t)

    def one_chunk(g, carry):
        h, y, entering = carry
        entering = _put(entering, h, g)
        h, y = steps.walk(g, position, (h, y))
        return h, y, entering

    h = call.initial.swapaxes(1, 2).astype(steps.a.dtype)
    y, entering = jnp.zeros_like(steps.delta), None
    if residuals:
        entering = jnp.zeros((h.shape[0], steps.chunks, *h.shape[1:]), h.dtype)
        carry = (h, y, entering)
        h, y, entering = jax.lax.fori_loop(0, steps.chunks, one_chunk, carry)
    else:
        h, y = steps.walk(0, position, (h, y))
    y = _passed_by(y[:, :T], u, call.skip)
    if call.z is not None:
        y = y * jax.nn.silu(call.z.astype(y.dtype))
    return SelectiveScanOutputs(y.astype(u.dtype), h.swapaxes(1, 2)), entering


def backward(
    call: SelectiveScanCall,
    residuals: Float[Array, "B G N I"],
    cotangents: SelectiveScanOutputs,
) -> SelectiveScanCall:
    """Returns gradients in place of the arrays.

    With g[t] the gradient of h[t], from the last position to the first:
    g[t] = dy[t] C[t] + exp(s[t+1] A) g[t+1]; the others are sums over g and h.
    """
    u, skip, z, dt_bias = call.u, call.skip, call.z, call.dt_bias
    T, dtype = u.shape[1], residuals.dtype
    wide = u.astype(dtype)
    # The gate z multiplies what the state and the skip gave: its own gradient needs
    # that sum again, which the loop makes as y.
    dy = d_out = cotangents.y.astype(dtype)
    if z is not None:
        sigmoid = jax.nn.sigmoid(z.astype(dtype))
        dy = d_out * z * sigmoid
    steps = _Steps.of(call, call.options.chunk)
    d_final = cotangents.final.swapaxes(1, 2).astype(dtype)
    dh, da, sums = _reverse(steps, residuals, dy, d_final)
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
        ddt = d_delta * jax.nn.sigmoid(call.dt.astype(dtype) + dt_bias.astype(dtype))
        d_bias = jnp.sum(ddt, axis=(0, 1))
    return call._replace(
        u=du,
        dt=ddt,
        a=jnp.sum(da, axis=0).T,
        b=db,
        c=dc,
        skip=d_skip,
        z=dz,
        dt_bias=d_bias,
        initial=dh.swapaxes(1, 2),
        starts=None,
    )


class _Steps(NamedTuple):
    """The loops' inputs, positions padded to full chunks, where the step is 0.

    Attributes:
      delta: s, [B, T, I].
      inputs: s u, [B, T, I].
      a: [N, I].
      b, c: [B, T, N].
      keep: 0 where a document starts, else 1, [B, T]; None: it is 1 everywhere.
      chunk: C, in positions.
      unroll: positions per iteration of a loop.
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
    def of(cls, call: SelectiveScanCall, chunk: int) -> "_Steps":
        """Lays them out in chunks of `chunk` positions."""
        u, starts = call.u, call.starts
        dtype = jnp.promote_types(u.dtype, jnp.float32)
        T = u.shape[1]
        chunk = min(chunk, T)

        def padded(x: Array) -> Array:
            missing = (0, -T % chunk)
            x = x.astype(dtype)
            return jnp.pad(x, ((0, 0), missing, *[(0, 0)] * (x.ndim - 2)))

        # A step of 0 changes no state and adds nothing, so padding needs no mask.
        delta = call.dt.astype(dtype)
        if call.dt_bias is not None:
            delta = jax.nn.softplus(delta + call.dt_bias.astype(dtype))
        inputs = padded(delta * u)
        # starts are padded with 0: the last state passes through the padding.
        keep = None if starts is None else 1 - padded(starts)
        delta, a = padded(delta), call.a.astype(dtype).T
        b, c = padded(call.b), padded(call.c)
        unroll = call.options.blocks.unroll
        if unroll is None:
            unroll = 1 if target.current().platform == "cpu" else _UNROLL
        return cls(delta, inputs, a, b, c, keep, chunk, min(unroll, chunk))

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


def _reverse(steps: _Steps, residuals: Array, dy: Array, d_final: Array):
    """Returns (gradient of the initial state, of a [B, N, I], five sums).

    The sums, for each position: over n, g B [B, T, I], which is the gradient of s u;
    the step's gradient through exp [B, T, I]; over i, those of B and C [B, T, N]; and
    y once more [B, T, I], as the state gives it.
    """
    B, padded, I = steps.delta.shape
    N, C = residuals.shape[2], steps.chunk
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

        start = (_at(residuals, g), states, states, y, dc)
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
