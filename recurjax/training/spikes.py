"""Steps that must not count: a loss that is not finite, or far above its neighbours."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from recurjax.types import Array, Scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeConfig:
    """When an update is skipped and when training stops.

    Attributes:
      enabled: False skips nothing and stops at nothing.
      window: the last losses that were not skipped, to compare with.
      sigma: skip when a loss is this many standard deviations above their mean. A loss,
        gradient or update that is not finite is always skipped.
      patience: this many skips in a row end the run.
    """

    enabled: bool = True
    window: int = 128
    sigma: float = 6.0
    patience: int = 10

    def __post_init__(self):
        if self.window < 2 or self.sigma <= 0 or self.patience < 1:
            raise ValueError(
                "SpikeConfig: window must be >= 2, sigma > 0 and patience >= 1, got "
                f"{self.window}, {self.sigma}, {self.patience}"
            )


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
    once `window` losses are known, loss <= mean + sigma * std of them.
    """
    good = jnp.isfinite(loss) & finite
    full = state.accepted >= config.window
    limit = state.losses.mean() + config.sigma * state.losses.std()
    good &= ~full | (loss <= limit)
    good |= not config.enabled
    # Only accepted losses enter the ring: a spike does not raise the next one's limit.
    slot = state.accepted % config.window
    kept = state.losses.at[slot].set(loss.astype(jnp.float32))
    return good, SpikeState(
        losses=jnp.where(good, kept, state.losses),
        accepted=state.accepted + good,
        skipped=jnp.where(good, 0, state.skipped + 1),
    )
