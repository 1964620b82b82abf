"""The paper's equations, and how positions and states are moved about.

Positions are counted from 0; a set of positions is a slice with a stride, or an array.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from recurjax.types import Array, Tokens
from recurjax.variants.latent_recurrent_transformer.config import MemoryConfig

Positions = slice | np.ndarray
"""A set of positions: `slice(s, None, S)`, or a sorted array of distinct ones."""


EPS = float(np.finfo(np.float32).eps)
"""float32's machine epsilon, whatever x is: what torch's rms_norm takes for bfloat16.

bfloat16's own, 2^-7, is as large as the mean square of small activations."""


def rms(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Computes x / sqrt(mean(x^2) + eps), eps = 1.2e-7 in every dtype.

    In at least float32, then cast back. Source: nanochat's parameter-free RMSNorm.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + EPS)).astype(x.dtype)


class InjectedMemory(NamedTuple):
    """The memory that enters the blocks at some positions.

    Attributes:
      state: m, [B, n, D].
      keys: W_k m of the shared projection, or None.
      values: W_v m of the shared projection, or None.
    """

    state: Float[Array, "B n D"]
    keys: Float[Array, "B n K E"] | None = None
    values: Float[Array, "B n K E"] | None = None


def mixed(
    local: Float[Array, "B n K E"],
    recurrent: Float[Array, "B n K E"] | None,
    gates: Float[Array, "B n 2 K"],
    *,
    replaces: Bool[Array, ""],
) -> Float[Array, "B n K E"]:
    """Computes g_local * local + g_rec * recurrent, eq. (4).

    Args:
      recurrent: None for a memory of zero.
      gates: 2 sigmoid(W_g a), eq. (3): local, then recurrent.
      replaces: leave the local part out.
    """
    local_part = jnp.where(replaces, 0, gates[:, :, 0])[..., None] * local
    if recurrent is None:
        return local_part
    return local_part + gates[:, :, 1][..., None] * recurrent


def take(x: Array, positions: Positions) -> Array:
    """Returns x[:, positions]."""
    return x[:, positions]


def put(x: Array, positions: Positions, new: Array) -> Array:
    """Returns x with x[:, positions] = new.

    A stride is written without a scatter: each new row repeated, chosen by a mask.
    """
    if isinstance(positions, np.ndarray):
        return x.at[:, positions].set(new)
    start, stop, stride = positions.indices(x.shape[1])
    if stride == 1:
        return jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=1)
    T, n = x.shape[1], new.shape[1]
    spread = jnp.repeat(new, stride, axis=1, total_repeat_length=n * stride)
    after = max(T - start - n * stride, 0)
    room = jnp.pad(spread, [(0, 0), (start, after)] + [(0, 0)] * (x.ndim - 2))[:, :T]
    index = np.arange(T)
    places = (index >= start) & (index < stop) & ((index - start) % stride == 0)
    return jnp.where(places.reshape(1, T, *[1] * (x.ndim - 2)), room, x)


def indices(positions: Positions, length: int) -> np.ndarray:
    """Returns a set of positions as an array."""
    if isinstance(positions, np.ndarray):
        return positions
    return np.arange(length)[positions]


def strided_partition(length: int, parts: int) -> tuple[slice, ...]:
    """Cuts positions into S subsets s, s + S, s + 2 S, ...: section 3.1.

    Raises:
      ValueError: S is not in 1..T.
    """
    if not 1 <= parts <= length:
        raise ValueError(
            f"strided_partition: parts must be in 1..{length}, the sequence's length, "
            f"got {parts}"
        )
    return tuple(slice(start, None, parts) for start in range(parts))


def entering(
    states: Float[Array, "B T D"],
    tokens: Tokens,
    memory: MemoryConfig,
    logits: Float[Array, " N"] | None,
    *,
    before: Float[Array, "B P D"] | None = None,
) -> Float[Array, "B T D"]:
    """Returns the memory of each of T tokens: a mix of the states before it.

    Args:
      states: states of the same T tokens.
      tokens: with segments, none receives a state of another document.
      logits: logits of the learned average over the lags, or None.
      before: the states before them, newest first; None: a sequence begins, with states
        of zero before it.
    """
    B, T, D = states.shape
    segments = tokens.segments
    depth = memory.depth if before is None else before.shape[1]
    # The cache is newest first; here the newest state comes last, before the first
    # token.
    early = (
        jnp.zeros((B, depth, D), states.dtype)
        if before is None
        else before[:, ::-1].astype(states.dtype)
    )
    # One sequence of states with `depth` earlier ones in front: lag n of token t is n
    # entries before it, also across the beginning.
    line = jnp.concatenate([early, states], axis=1)
    parts = []
    for lag in memory.lags:
        part = line[:, depth - lag : depth - lag + T]
        if memory.reset_token is not None:
            # A state from before the last reset token is another document's.
            near = tokens_since(tokens.ids, memory.reset_token) >= lag
            part = jnp.where(near[..., None], part, 0)
        if segments is not None and lag > 0:
            # Before the row there is no document: -1 is none's number.
            of_state = jnp.pad(segments, ((0, 0), (lag, 0)), constant_values=-1)[:, :T]
            part = jnp.where((of_state == segments)[..., None], part, 0)
        parts.append(part)
    return mixed_lags(parts, logits)


def mixed_lags(
    parts: list[Float[Array, "B T D"]], logits: Float[Array, " N"] | None
) -> Float[Array, "B T D"]:
    """Returns the sum of N states, or their learned average.

    States before the sequence count as zero; the weights are not renormalised there.
    """
    if logits is not None:
        # All lags weigh the same at first: the logits start at zero.
        weights = jax.nn.softmax(logits).astype(parts[0].dtype)
        parts = [w * part for w, part in zip(weights, parts, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def newest(
    old: Float[Array, "B P D"],
    states: Float[Array, "B T D"],
    tokens: Tokens,
    memory: MemoryConfig,
) -> Float[Array, "B P D"]:
    """Returns each row's last P states after T more tokens, newest first."""
    depth, T = old.shape[1], states.shape[1]
    # Padding on the right moves no row on.
    count = jnp.full(old.shape[0], T) if tokens.lengths is None else tokens.lengths
    old, states = forgotten(old, states, tokens, memory)
    # The last P real states of a row end at its own count, wherever padding begins.
    line = jnp.concatenate([old[:, ::-1], states.astype(old.dtype)], axis=1)
    index = depth + count[:, None] - 1 - jnp.arange(depth)
    return jnp.take_along_axis(line, index[..., None], axis=1)


def forgotten(
    old: Float[Array, "B P D"],
    new: Float[Array, "B T D"],
    tokens: Tokens,
    memory: MemoryConfig,
) -> tuple[Float[Array, "B P D"], Float[Array, "B T D"]]:
    """Sets the states before each row's last reset token to zero."""
    if memory.reset_token is None:
        return old, new
    T = tokens.ids.shape[1]
    count = T if tokens.lengths is None else tokens.lengths[:, None]
    places = jnp.arange(T)
    resets = (tokens.ids == memory.reset_token) & (places < count)
    # -1: no reset token came, and all that is old stays.
    last = jnp.max(jnp.where(resets, places, -1), axis=1)[:, None]  # [B, 1]
    old = jnp.where((last >= 0)[..., None], 0, old)
    return old, jnp.where((places >= last)[..., None], new, 0)


def tokens_since(ids: Int[Array, "B T"], reset_token: int) -> Int[Array, "B T"]:
    """Counts the tokens since the last reset token; a huge number without one."""
    places = jnp.arange(ids.shape[1])
    # Half of the smallest number, so that the difference below cannot overflow.
    endless = jnp.iinfo(jnp.int32).min // 2
    starts = jnp.where(ids == reset_token, places, endless)
    return places - jax.lax.cummax(starts, axis=1)
