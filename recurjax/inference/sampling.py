"""Samples the next token from logits: penalty, temperature, filters, draw."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Key, Num, UInt

from pallas_kernels import reductions, target
from recurjax.errors import UserError
from recurjax.ranges import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    RangeChecks,
)
from recurjax.types import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig(RangeChecks):
    """Sampling of the next token; the fields apply in this order.

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

    repetition_penalty: PositiveFloat = 1.0
    temperature: NonNegativeFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: PositiveFraction = 1.0
    min_p: Fraction = 0.0

    @property
    def penalizes(self) -> bool:
        """Whether `sample` needs to know which tokens were seen."""
        return self.repetition_penalty != 1


NOT_FINITE = -1
"""In place of a token: the logits that it was to be drawn from are not finite."""

PLAIN = SamplingConfig()
"""Draws from the model's own distribution."""


def requested_sampling(
    options: Any, defaults: Mapping[str, float]
) -> tuple[SamplingConfig, list[str]]:
    """Returns the sampling that options ask for, filled in with the model's defaults.

    Args:
      options: a command's, with the fields of `SamplingConfig`; None: not given.
      defaults: the model's, from its generation_config.json.

    Returns:
      The config, and those of the model's defaults that it has, as text.
    """
    explicit = {f.name: getattr(options, f.name) for f in fields(SamplingConfig)}
    explicit = {name: value for name, value in explicit.items() if value is not None}
    taken = {name: value for name, value in defaults.items() if name not in explicit}
    names = [f"{name} {value}" for name, value in taken.items()]
    return replace(PLAIN, **taken, **explicit), names


class RowSampling(NamedTuple):
    """Sampling parameters of each row: `SamplingConfig`s as arrays.

    They are arguments of a compiled program, so that every setting runs the same one.

    Attributes:
      repetition_penalty, temperature, top_p: as in `SamplingConfig`.
      top_k: where all are kept, the largest integer.
      log_min_p: minus infinity where all are kept.
    """

    repetition_penalty: Float[Array, " B"]
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    log_min_p: Float[Array, " B"]


def sampling_rows(configs: Sequence[SamplingConfig]) -> RowSampling:
    """Makes the arrays of a batch, one config a row; numpy's, which compile nothing."""
    wide = jax.dtypes.canonicalize_dtype(np.float64)
    # Below the smallest normal number a device may read a setting as zero.
    least, most = float(np.finfo(np.float32).tiny), np.iinfo(np.int32).max

    def row(config: SamplingConfig) -> tuple[float, ...]:
        temperature = config.temperature and max(config.temperature, least)
        floor = math.log(config.min_p) if config.min_p else -math.inf
        # A penalty that makes no logit infinite, because a difference of infinities is
        # NaN.
        penalty = min(max(config.repetition_penalty, 1e-30), 1e30)
        return penalty, temperature, max(config.top_p, least), floor

    penalty, temperature, top_p, floor = np.array([*map(row, configs)], wide).T
    top_k = [min(config.top_k or most, most) for config in configs]
    params: Any = (penalty, temperature, np.array(top_k, np.int32), top_p, floor)
    return RowSampling(*params)


class Draft(NamedTuple):
    """A guess at each row's token by a cheaper model, which `sample` verifies.

    Attributes:
      ids: drawn by `sample` from `logits` with other keys and the same other arguments;
        below 0: none.
      logits: the cheaper model's.
    """

    ids: Int[Array, " B"]
    logits: Float[Array, "B V"]


def draw_ids(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    drawn: Int[Array, " B"],
    seen: Bool[Array, "B V"] | None,
    sampling: RowSampling,
    draft: Draft | None = None,
) -> Int[Array, " B"]:
    """Draws a token for each row, or `NOT_FINITE`.

    A draw depends on the row's own stream and on how many it has drawn, not on the
    batch.

    Args:
      draft: see `sample`.
    """
    keys = jax.vmap(jax.random.fold_in)(keys, drawn)
    ids = sample(keys, logits, seen, sampling, draft)
    # Of NaN any token is as likely: none is drawn, and the host finds the mark.
    return jnp.where(jnp.isfinite(logits).all(-1), ids, NOT_FINITE)


def sample(
    keys: Key[Array, " B"],
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    rows: RowSampling,
    draft: Draft | None = None,
) -> Int[Array, " B"]:
    """Draws id[b] ~ softmax(filter(penalize(logits[b]) / temperature[b])) with keys[b].

    Computes in at least float32. A row's draw depends on its own key, logits and
    settings only. What no row of the batch asks for is not computed.

    Args:
      keys: one for each row; greedy choice uses none.
      seen: which tokens each row contains already, prompt included; None: no row has a
        repetition penalty, whatever `rows` says.
      draft: tokens that are drawn where this distribution allows it, which remains the
        same; None: none.
    """

    def penalized(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        if seen is None:
            return logits
        return penalize(logits, seen, rows.repetition_penalty)

    def filtered(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        temperature = jnp.where(greedy, 1, rows.temperature)[:, None]
        # The shift keeps a tiny temperature from overflowing: the maximum stays at 0.
        shifted = logits - reductions.largest(logits)[:, None]
        return filter_logits(shifted / temperature.astype(logits.dtype), rows)

    logits = penalized(logits)
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    greedy = rows.temperature == 0

    def drawn() -> Int[Array, " B"]:
        if draft is None:
            ids = jax.vmap(jax.random.categorical)(keys, filtered(logits))
        else:
            proposed = draft._replace(logits=filtered(penalized(draft.logits)))
            ids = _accept_or_redraw(keys, filtered(logits), proposed)
        return jnp.where(greedy, likeliest, ids.astype(jnp.int32))

    return jax.lax.cond(jnp.all(greedy), lambda: likeliest, drawn)


def _accept_or_redraw(
    keys: Key[Array, " B"], logits: Float[Array, "B V"], draft: Draft
) -> Int[Array, " B"]:
    """Draws from p = softmax(logits), given drafts from q = softmax(draft.logits).

    A draft is accepted with probability min(1, p / q), else the token is drawn from
    max(p - q, 0), normalized. Source: Leviathan et al. 2023, section 2.3.
    """
    accepting, drawing = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    p, q = reductions.softmax(logits), reductions.softmax(draft.logits)
    at = jnp.maximum(draft.ids, 0)[:, None]
    p_draft, q_draft = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (p, q))
    uniform = jax.vmap(lambda key: jax.random.uniform(key, dtype=p.dtype))(accepting)
    accepted = (draft.ids >= 0) & (uniform * q_draft < p_draft)
    rest = jnp.maximum(p - q, 0)
    # Without a draft the token is drawn from p; also where p - q is rounded to nothing.
    has_rest = (draft.ids >= 0) & (rest > 0).any(-1)
    rest = jnp.where(has_rest[:, None], jnp.log(rest), logits)
    return jnp.where(
        accepted, draft.ids, jax.vmap(jax.random.categorical)(drawing, rest)
    )


def penalize(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Makes seen tokens less likely: z / r where z > 0, z r where z < 0.

    Source: Keskar et al. 2019 (CTRL), section 4.1, with the sign rule of Hugging Face.
    """
    r = penalty[:, None].astype(logits.dtype)
    lowered = jnp.where(logits > 0, logits / r, logits * r)
    return jnp.where(seen, lowered, logits)


def filter_logits(
    logits: Float[Array, "B V"], rows: RowSampling
) -> Float[Array, "B V"]:
    """Sets to -inf what top_k, then top_p, then min_p drops; logits as tempered.

    top_p counts the probability that is left after top_k. A token that ties with the
    last one kept is kept too. Sources: Fan et al. 2018 (top-k), Holtzman et al. 2020
    (top-p), Nguyen et al. 2024 (min-p).
    """
    # A row without a filter keeps all of its logits in either branch, so other rows do
    # not affect it.
    logits = jax.lax.cond(
        jnp.any(rows.top_k < logits.shape[-1]),
        lambda z: _within(z, jnp.ones(z.shape, jnp.int32), rows.top_k),
        lambda z: z,
        logits,
    )
    limit = jnp.where(rows.top_p < 1, rows.top_p, jnp.inf).astype(logits.dtype)
    logits = jax.lax.cond(
        jnp.any(rows.top_p < 1),
        lambda z: _within(z, reductions.softmax(z), limit),
        lambda z: z,
        logits,
    )
    best = reductions.largest(logits)[:, None]
    floor = best + rows.log_min_p[:, None].astype(logits.dtype)
    return jnp.where(logits < floor, -jnp.inf, logits)


def row_keys(seed: int, rows: int) -> Key[Array, " B"]:
    """Returns the random stream of each row: key(seed) folded with the row's number.

    Raises:
      UserError: the seed is not in [0, 2^32).
    """
    if not 0 <= seed < 1 << 32:
        raise UserError(f"seed must be from 0 to 2^32 - 1, got {seed}")
    numbers = jnp.arange(rows, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)


def _within(
    logits: Float[Array, "B V"], weights: Num[Array, "B V"], limit: Num[Array, " B"]
) -> Float[Array, "B V"]:
    """Keeps a token while all likelier ones together weigh less than the limit.

    With a weight of 1 each that is top-k, with probabilities top-p. The last level of
    logits that is kept is searched by some bits at a time: a pass over V for each time,
    which takes less than to sort V logits.
    """
    order = _in_order(logits)
    bits, taken = 8 * order.dtype.itemsize, _bits_of_a_pass()
    digits = jnp.arange(1, 1 << taken, dtype=order.dtype)

    def search(n: Int[Array, ""], below: UInt[Array, " B"]) -> UInt[Array, " B"]:
        place = (bits - taken * (n + 1)).astype(order.dtype)
        tried = below[:, None] | (digits << place)
        likelier = jnp.where(order[:, None] > tried[..., None], weights[:, None], 0)
        reached = jnp.sum(likelier, axis=-1) >= limit[:, None]
        # The higher a level, the less is above it.
        return jnp.max(jnp.where(reached, tried, below[:, None]), axis=-1)

    # The highest level at which the limit is reached already: what is above is kept.
    below = jnp.zeros(logits.shape[0], order.dtype)
    below = jax.lax.fori_loop(0, bits // taken, search, below)
    return jnp.where(order > below[:, None], logits, -jnp.inf)


def _bits_of_a_pass() -> int:
    """Returns how many bits to settle per pass over the tokens on this device.

    What a pass reads is what it costs but on a CPU, which adds 15 sums in more than
    four times the time of one (8 rows of 50,000: 26 ms for 4).
    """
    return 1 if target.computes_on_few_cores() else 4


def _in_order(x: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """Maps numbers to integers above 0 in the same order, equal ones to equal."""
    kind = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    x = jnp.where(x == 0, jnp.zeros((), x.dtype), x)  # minus zero is zero
    bits = jax.lax.bitcast_convert_type(x, kind)
    sign = jnp.asarray(1, kind) << (8 * x.dtype.itemsize - 1)
    # Negative numbers are the larger, the larger their bits.
    return jnp.where(bits >= sign, ~bits, bits | sign)
