"""From logits to the next token: penalty, temperature, filters, draw."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Key

from recurjax.errors import UserError
from recurjax.types import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How the next token is chosen; the fields apply in this order.

    Attributes:
      repetition_penalty: divides positive and multiplies negative logits of the tokens
        that the prompt or the text so far contains; 1: none.
      temperature: divides the logits; 0 is greedy: the likeliest token, no filters.
      top_k: keep this many of the likeliest tokens; None: all.
      top_p: keep the fewest likeliest tokens that have this much probability together;
        1: all.
      min_p: keep the tokens with at least this share of the likeliest one's
        probability; 0: all.
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        wishes = (
            (0 < self.repetition_penalty < math.inf, "repetition_penalty", "above 0"),
            (0 <= self.temperature < math.inf, "temperature", "0 or above"),
            (self.top_k is None or self.top_k >= 1, "top_k", "at least 1"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p", "from 0 to 1"),
        )
        for holds, name, wish in wishes:
            if not holds:
                raise UserError(f"{name} must be {wish}, got {getattr(self, name)}")

    @property
    def penalizes(self) -> bool:
        """Whether `sample` needs to know which tokens were seen."""
        return self.repetition_penalty != 1


PLAIN = SamplingConfig()
"""Draws from the model's own distribution."""


def sample(
    keys: Key[Array, " B"],
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    config: SamplingConfig,
) -> Int[Array, " B"]:
    """Draws id[b] ~ softmax(filter(penalize(logits[b]) / temperature)) with keys[b].

    Computes in at least float32. A row's draw depends on its own key and logits only.

    Args:
      keys: one for each row; greedy choice uses none.
      seen: which tokens each row contains already, prompt included; may be None when
        the config does not penalize.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if config.penalizes:
        if seen is None:
            raise ValueError("sample: repetition_penalty != 1 needs seen, got None")
        logits = penalize(logits, seen, config.repetition_penalty)
    if config.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The shift keeps a tiny temperature from overflowing: the maximum stays at 0.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = filter_logits(logits / config.temperature, config)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def penalize(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: float
) -> Float[Array, "B V"]:
    """Makes seen tokens less likely: z / r where z > 0, z r where z < 0.

    Source: Keskar et al. 2019 (CTRL), section 4.1, with the sign rule of Hugging Face.
    """
    lowered = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, lowered, logits)


def filter_logits(
    logits: Float[Array, "B V"], config: SamplingConfig
) -> Float[Array, "B V"]:
    """Sets to -inf what top_k, then top_p, then min_p drops; logits as tempered.

    top_p counts the probability that is left after top_k. A token that ties with the
    last one kept is kept too. Sources: Fan et al. 2018 (top-k), Holtzman et al. 2020
    (top-p), Nguyen et al. 2024 (min-p).
    """
    V = logits.shape[-1]
    if config.top_k is not None and config.top_k < V:
        last = jax.lax.top_k(logits, config.top_k)[0][:, -1:]
        logits = _drop_below(logits, last)
    if config.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        # What all likelier tokens have together: a token stays while that is below
        # top_p, so that the likeliest always stays.
        likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = jnp.where(likelier < config.top_p, ordered, jnp.inf)
        logits = _drop_below(logits, jnp.min(kept, axis=-1, keepdims=True))
    if config.min_p > 0:
        best = jnp.max(logits, axis=-1, keepdims=True)
        logits = _drop_below(logits, best + math.log(config.min_p))
    return logits


def row_keys(seed: int, rows: int) -> Key[Array, " B"]:
    """Returns the random stream of each row: key(seed) folded with the row's number.

    Raises:
      UserError: the seed is not in [0, 2^32).
    """
    if not 0 <= seed < 1 << 32:
        raise UserError(f"the seed must be from 0 to 2^32 - 1, got {seed}")
    numbers = jnp.arange(rows, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)


def _drop_below(
    logits: Float[Array, "B V"], threshold: Float[Array, "B 1"]
) -> Float[Array, "B V"]:
    return jnp.where(logits < threshold, -jnp.inf, logits)
