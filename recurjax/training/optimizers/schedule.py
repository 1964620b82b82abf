"""Learning-rate schedules: a factor of the peak rate for every step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import optax
from jaxtyping import Float

from recurjax.errors import UserError
from recurjax.ranges import Fraction, NonNegativeInt, RangeChecks
from recurjax.types import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant(RangeChecks):
    """Linear warm-up, then the peak rate.

    Attributes:
      warmup_steps: steps of the linear warm-up from `start` to the peak.
      start: factor of the peak learning rate at step 0.
    """

    warmup_steps: NonNegativeInt = 0
    start: Fraction = 0.0
    reads_steps: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(RangeChecks):
    """Linear warm-up, then a cosine decay to the end of the run.

    Attributes:
      warmup_steps: steps of the linear warm-up from `start` to the peak.
      start: factor of the peak learning rate at step 0.
      end: factor of the peak learning rate at the end of the run.
    """

    warmup_steps: NonNegativeInt = 0
    start: Fraction = 0.0
    end: Fraction = 0.1
    reads_steps: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearWarmdown(RangeChecks):
    """Linear warm-up, the peak rate, then a linear decay over the last steps.

    Attributes:
      warmup_steps: steps of the linear warm-up from `start` to the peak.
      start: factor of the peak learning rate at step 0.
      warmdown: share of all steps that the linear decay at the end takes.
      end: factor of the peak learning rate at the end of the run.
    """

    warmup_steps: NonNegativeInt = 0
    start: Fraction = 0.0
    warmdown: Fraction = 0.5
    end: Fraction = 0.0
    reads_steps: ClassVar[bool] = True


Schedule = Constant | Cosine | LinearWarmdown
"""Every schedule: a closed union; JSON names the class. `reads_steps` says
whether the rate of a step depends on the run's total number of steps."""


def learning_rate(
    schedule: Schedule, *, peak: float | Float[Array, ""], steps: int
) -> Callable:
    """Returns the optax schedule: optimizer step (from 0) -> learning rate.

    Args:
      schedule: its shape.
      peak: the highest learning rate; it may be traced.
      steps: optimizer steps of the full run.

    Raises:
      UserError: the warm-up is negative or longer than the run.
    """
    warmup = schedule.warmup_steps
    if not 0 <= warmup <= steps:
        raise UserError(
            "schedule.warmup_steps must be between 0 and training.steps = "
            f"{steps}, got {warmup}"
        )
    match schedule:
        case Constant():
            after = optax.constant_schedule(peak)
        case Cosine():
            after = optax.cosine_decay_schedule(
                peak, max(steps - warmup, 1), alpha=schedule.end
            )
        case LinearWarmdown():
            down = min(round(schedule.warmdown * steps), steps - warmup)
            after = optax.join_schedules(
                [
                    optax.constant_schedule(peak),
                    optax.linear_schedule(peak, peak * schedule.end, max(down, 1)),
                ],
                [steps - warmup - down],
            )
    if warmup == 0:
        return after
    rise = optax.linear_schedule(peak * schedule.start, peak, warmup)
    joined = optax.join_schedules([rise, after], [warmup])
    return lambda step: jnp.asarray(joined(step), jnp.float32)
