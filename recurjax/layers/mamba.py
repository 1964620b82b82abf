"""The Mamba mixer: a function of arrays, the module with its weights, its costs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from pallas_kernels.selective_scan import selective_scan
from recurjax.layers.linear import Maps, linear
from recurjax.ranges import PositiveInt, RangeChecks
from recurjax.types import Array

DT_LEAST, DT_MOST = 0.001, 0.1
"""Initial steps are between these, evenly in their logarithm (Mamba's authors)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaConfig(RangeChecks):
    """Sizes of a Mamba mixer, whose width M its layer decides.

    In RecurFormer M = n E, the width of the n heads that it replaces. Source: Gu and
    Dao 2023; the defaults are RecurFormer's sizes (appendix B).

    Attributes:
      conv: taps of the causal convolution.
      state: N, the states of a channel.
      dt_rank: R, the rank of the step size's projection. RecurFormer's 256
        exceeds the channels of a single head of width 64; Mamba's authors use M / 16.
      expand: channels per width: I = expand M.
    """

    conv: PositiveInt = 4
    state: PositiveInt = 16
    dt_rank: PositiveInt = 256
    expand: PositiveInt = 2

    def maps(self, width: int) -> Maps:
        """Returns the sizes (N, M) of its linear maps, by name."""
        channels, R = self.expand * width, self.dt_rank
        maps = {"u": (width, channels), "z": (width, channels)}
        maps |= {"x": (channels, R + 2 * self.state), "dt": (R, channels)}
        return maps | {"back": (channels, width)}


class MambaCache(NamedTuple):
    """A mixer's state and last inputs, in float32; of width 0 in training.

    Attributes:
      conv: the last inputs of the convolution, the oldest first; zeros before the row.
      state: h after the last token.
    """

    conv: Float[Array, "B I taps"]
    state: Float[Array, "B I N"]


class MambaWeights(NamedTuple):
    """A mixer's weights, of width M, channels I, states N, rank R.

    Attributes:
      w_u, w_z: input projections to the recurrence and to its gate.
      w_conv, b_conv: taps, the oldest first, and bias of each channel.
      w_x: from a channel's input to step (R columns), B (N) and C (N).
      w_dt, b_dt: from R to each channel's step.
      a_log: A = -exp(a_log).
      skip: D.
      w_back: output projection.
    """

    w_u: Float[Array, "M I"]
    w_z: Float[Array, "M I"]
    w_conv: Float[Array, "taps I"]
    b_conv: Float[Array, " I"]
    w_x: Float[Array, "I W"]
    w_dt: Float[Array, "R I"]
    b_dt: Float[Array, " I"]
    a_log: Float[Array, "I N"]
    skip: Float[Array, " I"]
    w_back: Float[Array, "I M"]


def mix(
    x: Float[Array, "B T M"],
    weights: MambaWeights,
    cache: MambaCache,
    *,
    starts: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T M"], MambaCache]:
    """Runs T more positions of a mixer.

    u, z = x W_u, x W_z;  u = silu(conv(u));  dt, B, C = u W_x;
    y = scan(u, softplus(dt W_dt + b), A, B, C) + D u;  out = (y silu(z)) W_back.
    There is neither norm nor residual inside. Source: Gu and Dao 2023, figure 3.

    Args:
      cache: cache of the tokens before x.
      starts: positions before which everything past is forgotten (a document begins).
      lengths: how many of the T positions are real; the others leave the cache as it
        is, and their outputs have no meaning. None: all.

    Returns:
      What the mixer writes, and the cache after x.
    """
    # Sizes from the arrays: the function serves any width.
    N, R = weights.a_log.shape[-1], weights.w_dt.shape[0]
    u, z = linear(x, weights.w_u), linear(x, weights.w_z)
    u, conv = causal_convolution(
        u, weights.w_conv, weights.b_conv, cache.conv, starts=starts, lengths=lengths
    )
    u = jax.nn.silu(u)
    # One product makes step, B and C of every channel.
    dt, b, c = jnp.split(linear(u, weights.w_x), [R, R + N], axis=-1)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    scan = selective_scan if weights.a_log.ndim == 2 else _scan_by_row
    y, state = scan(
        u,
        linear(dt, weights.w_dt),
        # A is negative, so that exp(dt A) decays for every positive step.
        -jnp.exp(weights.a_log.astype(dtype)),
        b,
        c,
        skip=weights.skip.astype(dtype),
        # The op multiplies by silu(z) itself, before its result leaves the chip.
        z=z,
        dt_bias=weights.b_dt.astype(dtype),
        initial=cache.state,
        starts=starts,
        lengths=lengths,
    )
    return linear(y, weights.w_back), MambaCache(conv, state)


def _scan_by_row(u, dt, a, b, c, *, skip, dt_bias, starts, **by_row):
    """Runs a step of one token in which each row has an A, a D and a bias of its own.

    No kernel runs a single token, so that XLA may batch the op over rows.
    """
    assert u.shape[1] == 1 and starts is None

    def row(u, dt, a, b, c, skip, dt_bias, options):
        own = {"skip": skip[0], "dt_bias": dt_bias[0]}
        rows = jax.tree.map(lambda x: x[None], (u, dt, b, c, options))
        u, dt, b, c, options = rows
        result = selective_scan(u, dt, a[0], b, c, **own, **options)
        return jax.tree.map(lambda x: x[0], result)

    return jax.vmap(row)(u, dt, a, b, c, skip, dt_bias, by_row)


def causal_convolution(
    u: Float[Array, "B T I"],
    taps: Float[Array, "n I"],
    bias: Float[Array, "*rows I"],
    before: Float[Array, "B I n"],
    *,
    starts: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
) -> tuple[Float[Array, "B T I"], Float[Array, "B I n"]]:
    """Computes y[t] = bias + sum_j taps[j] u[t - (n - 1) + j] by channel.

    Inputs of an earlier document count as zeros.

    Args:
      bias: one for all rows, or one of each token's own.
      before: the n inputs before u, the oldest first.

    Returns:
      y, and the n inputs before the next position, as `before`.
    """
    B, T, I = u.shape
    n = taps.shape[0]
    dtype = jnp.promote_types(u.dtype, jnp.float32)
    past = before.swapaxes(1, 2).astype(dtype)  # [B, n, I]
    row = jnp.concatenate([past, u.astype(dtype)], axis=1)  # position t is entry n + t
    # Which document an entry is of; what came before the call is of the first one.
    document = None
    if starts is not None:
        document = jnp.cumsum(jnp.pad(starts, ((0, 0), (n, 0))), axis=1)
    y = jnp.broadcast_to(bias.astype(dtype), (B, T, I))
    # Tap j of a position is the input n - 1 - j before it.
    for tap in range(n):
        shifted = row[:, tap + 1 : tap + 1 + T]
        if document is not None:
            same = document[:, tap + 1 : tap + 1 + T] == document[:, n:]
            shifted = jnp.where(same[..., None], shifted, 0)
        y = y + taps[tap].astype(dtype) * shifted
    # The n entries up to each row's last real position.
    # The last real position of each row; padding after it is not kept.
    end = jnp.full(B, T) if lengths is None else lengths
    at = end[:, None] + jnp.arange(n)
    inputs = jnp.take_along_axis(row, at[..., None], axis=1)
    if document is not None:
        # Inputs of an earlier document must not enter the next call's.
        last = jnp.take_along_axis(document, (end + n - 1)[:, None], axis=1)
        same = jnp.take_along_axis(document, at, axis=1) == last
        inputs = jnp.where(same[..., None], inputs, 0)
    return y.astype(u.dtype), inputs.swapaxes(1, 2).astype(before.dtype)


class Mamba(nnx.Module):
    """Owns a mixer's weights. They start as the Mamba authors' do.

    A = -(1 .. N) in every channel, D = 1, the step's bias gives steps drawn evenly in
    their logarithm, its weight is uniform in +-R^-1/2, the rest uniform in
    +-(fan in)^-1/2. RecurFormer's paper says nothing of it.

    Args:
      width: M.
      draw_back: draws W_back, of shape [I, M], from a key; None: uniform as the rest.
    """

    def __init__(
        self,
        config: MambaConfig,
        width: int,
        *,
        draw_back: Callable[[Array, tuple[int, int]], Array] | None = None,
        rngs: nnx.Rngs,
    ):
        self.config, self.width = config, width
        N, R, I = config.state, config.dt_rank, config.expand * width

        def uniform(shape: tuple[int, ...], fan_in: int) -> nnx.Param:
            bound = fan_in**-0.5
            drawn = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
            return nnx.Param(drawn)

        self.w_u = uniform((width, I), width)
        self.w_z = uniform((width, I), width)
        self.w_conv = uniform((config.conv, I), config.conv)
        self.b_conv = uniform((I,), config.conv)
        self.w_x = uniform((I, R + 2 * N), I)
        self.w_dt = uniform((R, I), R)
        steps = jnp.exp(
            jax.random.uniform(
                rngs.params(), (I,), jnp.float32, math.log(DT_LEAST), math.log(DT_MOST)
            )
        )
        # The inverse of softplus, so that the first steps are those drawn.
        self.b_dt = nnx.Param(steps + jnp.log(-jnp.expm1(-steps)))  # softplus^-1
        self.a_log = nnx.Param(
            jnp.tile(jnp.log(jnp.arange(1, N + 1, dtype=jnp.float32)), (I, 1))
        )
        self.skip = nnx.Param(jnp.ones(I, jnp.float32))
        if draw_back is None:
            self.w_back = uniform((I, width), I)
        else:
            self.w_back = nnx.Param(draw_back(rngs.params(), (I, width)))

    def weights(self) -> MambaWeights:
        """Returns the arrays."""
        return MambaWeights(
            *(getattr(self, name)[...] for name in MambaWeights._fields)
        )

    def init_cache(self, batch: int) -> MambaCache:
        """Creates the cache before the first token: zeros, always float32 or wider."""
        return empty_mamba_cache(self.config, self.width, batch, self.w_u[...].dtype)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        cache: MambaCache,
        *,
        starts: Bool[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T M"], MambaCache]:
        return mix(x, self.weights(), cache, starts=starts, lengths=lengths)


def empty_mamba_cache(config: MambaConfig, width: int, batch: int, dtype) -> MambaCache:
    """Creates the cache of a mixer of width M before the first token.

    Args:
      dtype: dtype of the activations; inputs and states are at least float32.
    """
    channels, wide = config.expand * width, jnp.promote_types(dtype, jnp.float32)
    return MambaCache(
        conv=jnp.zeros((batch, channels, config.conv), wide),
        state=jnp.zeros((batch, channels, config.state), wide),
    )


def mamba_weights(mamba: MambaConfig, width: int) -> int:
    """Counts the weights of a mixer of width M, less its vectors a channel."""
    products = sum(n * m for n, m in mamba.maps(width).values())
    return products + mamba.conv * mamba.expand * width


def mamba_flops(mamba: MambaConfig, width: int) -> float:
    """Counts training FLOPs per token: 6 a weight, and 27 a state of the scan.

    Of the scan 9 a step (the decay, its exponential, the input, the sum over states),
    once forward and twice backward.
    """
    scan = 27.0 * mamba.expand * width * mamba.state
    return 6.0 * mamba_weights(mamba, width) + scan
