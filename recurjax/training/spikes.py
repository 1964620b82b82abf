"""The spike rule skips steps whose loss is not finite or far above the recent ones."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from recurjax.errors import UserError
from recurjax.ranges import PositiveFloat, PositiveInt, Range, RangeChecks
from recurjax.types import Array, Scalar

LARGEST_WINDOW = 2**16
_FEWEST = 16
"""Losses that must be known before one can be far above them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeConfig(RangeChecks):
    """When an update is skipped and when training stops.

    Attributes:
      enabled: watch for spikes; off: never skip a step and never stop.
      window: number of recent losses, without skipped ones, to compare a loss with.
      sigma: skip a step whose loss is this many deviations above their median. A loss,
        gradient or update that is not finite is always skipped.
      patience: number of skips in a row that stops the run. If the skipped losses are
        as steady as those before, training accepts their level and continues.
    """

    enabled: bool = True
    window: Annotated[int, Range(least=2, most=LARGEST_WINDOW)] = 128
    sigma: PositiveFloat = 6.0
    patience: PositiveInt = 10


class SpikeState(NamedTuple):
    """The rule's state; part of the training state, so that resuming is exact.

    Attributes:
      losses: the last accepted losses, a ring.
      known: how many losses entered the ring since it was last emptied.
      rejected: the losses of the current row of skipped updates; inf where the loss,
        gradient or update was not finite.
      accepted: how many updates were made.
      skipped: how many updates were skipped since the last one made.
    """

    losses: Float[Array, " window"]
    known: Int[Array, ""]
    rejected: Float[Array, " patience"]
    accepted: Int[Array, ""]
    skipped: Int[Array, ""]


def new_spike_state(config: SpikeConfig) -> SpikeState:
    """Returns the state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return SpikeState(
        losses=jnp.zeros(config.window, jnp.float32),
        known=zero,
        rejected=jnp.zeros(config.patience, jnp.float32),
        accepted=zero,
        skipped=zero,
    )


def judge(
    state: SpikeState,
    loss: Scalar,
    finite: Bool[Array, ""],
    config: SpikeConfig,
    *,
    new_data: Bool[Array, ""] | bool = False,
) -> tuple[Bool[Array, ""], SpikeState]:
    """Returns whether the step counts, and remembers it.

    The step counts when the loss is finite, gradient and update are (`finite`) and,
    once 16 losses x are known (or a full smaller window),

        loss <= m + sigma * max(1.4826 * median |x - m|, max(1, m) / 100),

    m = median x. 1.4826 makes the deviation that of a normal distribution. Medians,
    since one huge loss that was let in at the start would raise a mean and a standard
    deviation so far that no later one is seen, and a loss that grows by half every step
    would stay near them. The last term keeps losses that hardly differ from making a
    spike of nothing.

    A loss that rises once and stays is a new level, not a spike: data became harder.
    The last loss that patience allows counts if that row is as steady as the losses
    before it, see `_steady`, and the window then holds the row.

    Args:
      state: before the step.
      loss: loss of the step.
      finite: whether gradient and update are.
      config: the rule.
      new_data: whether the data changes at this step (weights of a mixture), so that
        earlier losses say nothing about this one.
    """
    sound = jnp.isfinite(loss) & finite
    seen = jnp.where(new_data, 0, state.known)
    # The ring is full after `window` accepted losses.
    known = jnp.minimum(seen, config.window)
    middle, deviation = _spread(state.losses, known)
    judged = known >= min(_FEWEST, config.window)
    good = sound & (~judged | (loss <= middle + _bound(middle, deviation, config)))
    loss = loss.astype(jnp.float32)
    place = state.skipped % state.rejected.size
    rejected = state.rejected.at[place].set(jnp.where(sound, loss, jnp.inf))
    new_level = (
        (state.skipped + 1 >= config.patience)
        & _steady(rejected, deviation, config)
        & ~good
    )
    counts = good | new_level | (not config.enabled)
    # Only accepted losses enter the ring: a spike does not raise the next one's limit.
    losses = jnp.where(
        new_level,
        _filled(rejected, state.losses.size),
        jnp.where(good, state.losses.at[seen % config.window].set(loss), state.losses),
    )
    known_next = jnp.where(
        new_level, min(config.patience, config.window), seen + good.astype(jnp.int32)
    )
    return counts, SpikeState(
        losses=losses,
        known=known_next,
        rejected=rejected,
        accepted=state.accepted + counts,
        skipped=jnp.where(counts, 0, state.skipped + 1),
    )


def _bound(middle: Scalar, deviation: Scalar, config: SpikeConfig) -> Scalar:
    """Returns how far a loss may be from the median of its level."""
    return config.sigma * jnp.maximum(deviation, jnp.maximum(1.0, middle) / 100)


def _steady(
    row: Float[Array, " patience"], deviation: Scalar, config: SpikeConfig
) -> Bool[Array, ""]:
    """Whether a series of losses stays at one level.

    All are within `_bound` of their median, and the medians of the earlier and the
    later half within half of that: a loss that keeps growing is not a level, and
    neither is a single loss.
    """
    N = row.size
    if N == 1:
        return jnp.bool_(False)
    level = _median(row, jnp.int32(N))
    bound = _bound(level, deviation, config)
    early, late = jnp.median(row[: max(1, N // 2)]), jnp.median(row[N // 2 :])
    inside = jnp.max(jnp.abs(row - level)) <= bound
    return jnp.all(jnp.isfinite(row)) & inside & (jnp.abs(late - early) <= bound / 2)


def _spread(values: Float[Array, " N"], known: Int[Array, ""]) -> tuple[Scalar, Scalar]:
    """Returns the median of the first `known` values and their deviation from it."""
    middle = _median(values, known)
    return middle, 1.4826 * _median(jnp.abs(values - middle), known)


def _filled(values: Float[Array, " N"], size: int) -> Float[Array, " size"]:
    """Returns the first `size` values, zeros after them."""
    return jnp.zeros(size, values.dtype).at[: values.size].set(values[:size])


def _median(values: Float[Array, " N"], known: Int[Array, ""]) -> Scalar:
    """Computes the median of the first `known` values; 0 of none."""
    # What is not known yet is sorted to the end.
    slots = jnp.arange(values.size)
    ordered = jnp.sort(jnp.where(slots < known, values, jnp.inf))
    low, high = (known - 1) // 2, known // 2
    return jnp.where(known > 0, (ordered[low] + ordered[high]) / 2, 0.0)


class Diverged(UserError):
    """A run diverged: it ends, and other runs of a sweep continue."""


def skip_message(step: int, skipped: int, metrics: Mapping[str, float]) -> str:
    """Returns the message for a skipped step, from the metrics of `train_step`."""
    return (
        f"step {step} was skipped ({skipped} in a row): {fault(metrics)} (loss "
        f"{metrics['loss']:.4g}, gradient norm {metrics['gradient_norm']:.4g})"
    )


def fault(metrics: Mapping[str, float]) -> str:
    """Names what made a step not count."""
    names = {
        "loss": "the loss",
        "gradient_norm": "the gradient's norm",
        "update_norm": "the update's norm",
    }
    reasons = [
        f"{sentence} is {metrics[name]}"
        for name, sentence in names.items()
        if not math.isfinite(metrics[name])
    ]
    far = f"the loss, {metrics['loss']:.4g}, is far above the last ones"
    return ", ".join(reasons) or far
