"""Steps that must not count: a loss that is not finite, or far above its neighbours."""

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
      enabled: False skips nothing and stops at nothing.
      window: the last losses that were not skipped, to compare with.
      sigma: skip when a loss is this many deviations above their median, see `judge`. A
        loss, gradient or update that is not finite is always skipped.
      patience: this many skips in a row end the run.
    """

    enabled: bool = True
    window: Annotated[int, Range(least=2, most=LARGEST_WINDOW)] = 128
    sigma: PositiveFloat = 6.0
    patience: PositiveInt = 10


class SpikeState(NamedTuple):
    """What the rule remembers; part of the training state, so resuming is exact.

    Attributes:
      losses: the last accepted losses, a ring.
      accepted: how many updates were made.
      skipped: how many updates were skipped since the last one made.
    """

    losses: Float[Array, " window"]
    accepted: Int[Array, ""]
    skipped: Int[Array, ""]


def new_spike_state(config: SpikeConfig) -> SpikeState:
    """Returns the state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    losses = jnp.zeros(config.window, jnp.float32)
    return SpikeState(losses=losses, accepted=zero, skipped=zero)


def judge(
    state: SpikeState, loss: Scalar, finite: Bool[Array, ""], config: SpikeConfig
) -> tuple[Bool[Array, ""], SpikeState]:
    """Says whether the step counts, and remembers it.

    The step counts when the loss is finite, gradient and update are (`finite`) and,
    once 16 losses x are known (or a whole smaller window),

        loss <= m + sigma * max(1.4826 * median |x - m|, max(1, m) / 100),

    m = median x. 1.4826 makes the deviation that of a normal distribution. Medians,
    since one huge loss that was let in at the start would raise a mean and a standard
    deviation so far that no later one is seen, and a loss that grows by half every step
    would stay near them. The last term keeps losses that hardly differ from making a
    spike of nothing.
    """
    good = jnp.isfinite(loss) & finite
    # The ring is full after `window` accepted losses.
    known = jnp.minimum(state.accepted, config.window)
    middle = _median(state.losses, known)
    deviation = 1.4826 * _median(jnp.abs(state.losses - middle), known)
    least = jnp.maximum(1.0, middle) / 100
    limit = middle + config.sigma * jnp.maximum(deviation, least)
    good &= (known < min(_FEWEST, config.window)) | (loss <= limit)
    good |= not config.enabled
    # Only accepted losses enter the ring: a spike does not raise the next one's limit.
    slot = state.accepted % config.window
    kept = state.losses.at[slot].set(loss.astype(jnp.float32))
    return good, SpikeState(
        losses=jnp.where(good, kept, state.losses),
        accepted=state.accepted + good,
        skipped=jnp.where(good, 0, state.skipped + 1),
    )


def _median(values: Float[Array, " window"], known: Int[Array, ""]) -> Scalar:
    """Computes the median of the first `known` values; 0 of none."""
    # What is not known yet is sorted to the end.
    slots = jnp.arange(values.size)
    ordered = jnp.sort(jnp.where(slots < known, values, jnp.inf))
    low, high = (known - 1) // 2, known // 2
    return jnp.where(known > 0, (ordered[low] + ordered[high]) / 2, 0.0)


class Diverged(UserError):
    """A run that its settings led astray: it ends, and others beside it need not."""


def skip_message(step: int, skipped: int, metrics: Mapping[str, float]) -> str:
    """Tells of a step that did not count, from the metrics of `train_step`."""
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
    told = [
        f"{said} is {metrics[name]}"
        for name, said in names.items()
        if not math.isfinite(metrics[name])
    ]
    far = f"the loss, {metrics['loss']:.4g}, is far above the last ones"
    return ", ".join(told) or far
