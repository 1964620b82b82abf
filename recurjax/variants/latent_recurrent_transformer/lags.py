"""Which earlier states enter a token: lags, their mixes, resets at document starts."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from recurjax.types import Array, Tokens
from recurjax.variants.latent_recurrent_transformer.config import MemoryConfig


def entering(
    states: Float[Array, "B T D"],
    ids: Int[Array, "B T"],
    memory: MemoryConfig,
    logits: Float[Array, " N"] | None,
    *,
    before: Float[Array, "B P D"] | None = None,
) -> Float[Array, "B T D"]:
    """Returns the memory of each of T tokens: a mix of the states before it.

    Args:
      states: of the same T tokens.
      logits: of the learned average over the lags, or None.
      before: the states before them, newest first; None: a sequence begins, with states
        of zero before it.
    """
    B, T, D = states.shape
    depth = memory.depth if before is None else before.shape[1]
    # Newest first in the cache; on the line the newest stands next to the first token.
    early = (
        jnp.zeros((B, depth, D), states.dtype)
        if before is None
        else before[:, ::-1].astype(states.dtype)
    )
    # One line of states with `depth` earlier ones in front: lag n of token t stands n
    # before it, also across the beginning.
    line = jnp.concatenate([early, states], axis=1)
    parts = []
    for lag in memory.lags:
        part = line[:, depth - lag : depth - lag + T]
        if memory.reset_token is not None:
            # A state from before the last reset token is another document's.
            near = tokens_since(ids, memory.reset_token) >= lag
            part = jnp.where(near[..., None], part, 0)
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
    found = (tokens.ids == memory.reset_token) & (places < count)
    # -1: no reset token came, and all that is old stays.
    last = jnp.max(jnp.where(found, places, -1), axis=1)[:, None]  # [B, 1]
    old = jnp.where((last >= 0)[..., None], 0, old)
    return old, jnp.where((places >= last)[..., None], new, 0)


def tokens_since(ids: Int[Array, "B T"], reset_token: int) -> Int[Array, "B T"]:
    """Counts the tokens since the last reset token; without one, endlessly many."""
    places = jnp.arange(ids.shape[1])
    # Half of the smallest number, so that the difference below cannot overflow.
    endless = jnp.iinfo(jnp.int32).min // 2
    starts = jnp.where(ids == reset_token, places, endless)
    return places - jax.lax.cummax(starts, axis=1)
