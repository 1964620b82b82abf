"""Optimizers as configs, built from optax."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import optax

from recurjax.parameters import parameter_name, rule_of
from recurjax.ranges import (
    DecayRate,
    NonNegativeFloat,
    PositiveFloat,
    RangeChecks,
)
from recurjax.training.optimizers.muon import MuonAdamW, RunSize, muon_adamw


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(RangeChecks):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Attributes:
      learning_rate: peak learning rate.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added to the square root of the second moment.
      weight_decay: share of a weight that each step subtracts, times the learning rate.
      decay: what decays: "matrices", with embeddings, but no norms and biases; "all",
        everything.
    """

    learning_rate: PositiveFloat
    b1: DecayRate = 0.9
    b2: DecayRate = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    decay: Literal["matrices", "all"] = "matrices"
    reads_steps: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(RangeChecks):
    """Adam (Kingma and Ba 2015).

    Attributes:
      learning_rate: peak learning rate.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added to the square root of the second moment.
    """

    learning_rate: PositiveFloat
    b1: DecayRate = 0.9
    b2: DecayRate = 0.95
    eps: PositiveFloat = 1e-8
    reads_steps: ClassVar[bool] = False


OptimizerConfig = AdamW | Adam | MuonAdamW
"""Every optimizer: a closed union; JSON names the class. Each has a
`learning_rate`, the peak of the rate that is scheduled and shown, and `reads_steps`:
whether a step depends on the run's total number of steps, apart from its rate."""


def build_optimizer(
    config: OptimizerConfig,
    rate: Callable,
    *,
    clip: float | None,
    steps: int | None = None,
    size: RunSize | None = None,
) -> optax.GradientTransformation:
    """Returns the gradient transformation of a complete training step.

    Args:
      config: which optimizer.
      rate: optimizer step -> learning rate.
      clip: largest global norm of the gradient, or None.
      steps: steps of the full run; MuonAdamW, which schedules more than its rate, needs
        it.
      size: size of model and batch; MuonAdamW, which scales its rates by them, needs
        it.
    """
    clipping = [] if clip is None else [optax.clip_by_global_norm(clip)]
    if isinstance(config, MuonAdamW):
        if steps is None or size is None:
            raise ValueError(
                "build_optimizer: MuonAdamW needs steps and size, got None"
            )
        return optax.chain(*clipping, muon_adamw(config, rate, steps=steps, size=size))
    return optax.chain(*clipping, *_adam(config, rate))


def _adam(
    config: AdamW | Adam, rate: Callable
) -> Iterator[optax.GradientTransformation]:
    yield optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if isinstance(config, AdamW):
        mask = is_weight if config.decay == "matrices" else None
        yield optax.add_decayed_weights(config.weight_decay, mask=mask)
    yield optax.scale_by_learning_rate(rate)


def is_weight(parameters: Any) -> Any:
    """Returns a tree of bools: True for matrices and tables, False for vectors."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: rule_of(parameter_name(path)).is_weight, parameters
    )
