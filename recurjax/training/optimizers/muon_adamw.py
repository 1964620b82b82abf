"""MuonAdamW: Muon for matrices, AdamW with rates of their own for the rest."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from recurjax.parameters import parameter_name, rule_of
from recurjax.ranges import (
    DecayRate,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    RangeChecks,
)
from recurjax.training.optimizers.muon import muon

_REFERENCE_WIDTH, _REFERENCE_BATCH, _REFERENCE_LAYERS = 768, 2**19, 12
_BETAS = (0.8, 0.95)


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonAdamW(RangeChecks):
    """Muon and AdamW side by side, with nanochat's groups and scaling rules.

    Every rate follows the schedule and is multiplied by sqrt(tokens a batch / 2^19);
    the embeddings' and the head's also by (D / 768)^-1/2. Only Muon's matrices decay:
    by weight_decay (12 / L)^2, linearly to 0 over the run. AdamW has betas (.8, .95),
    those of the input scales (.96, .95), and eps 1e-10. Batch, D and L are the run's
    own (`RunSize`): nothing here repeats them.

    Attributes:
      learning_rate: peak rate of the matrices (all weights but those named below).
      embedding_rate: of token, value and position embeddings.
      head_rate: of an untied head.
      scalar_rate: of norms, biases and scales; of residual scales a hundredth.
      weight_decay: before its scaling by depth.
      momentum, momentum_steps: Muon's rises in a line from the first to the second in
        so many steps.
      dtype: of Muon's Newton-Schulz products.
    """

    learning_rate: PositiveFloat = 0.02
    embedding_rate: PositiveFloat = 0.3
    head_rate: PositiveFloat = 0.004
    scalar_rate: PositiveFloat = 0.5
    weight_decay: NonNegativeFloat = 0.2
    momentum: tuple[DecayRate, DecayRate] = (0.85, 0.95)
    momentum_steps: PositiveInt = 300
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def reads_steps(self) -> bool:
        """Whether there is a weight decay, which goes to 0 over the whole run."""
        return self.weight_decay > 0


class RunSize(NamedTuple):
    """What MuonAdamW scales its rates and decay by.

    Attributes:
      width: D of the model.
      layers: L of the model.
      tokens: in a batch, over all devices and accumulation parts.
    """

    width: int = _REFERENCE_WIDTH
    layers: int = _REFERENCE_LAYERS
    tokens: int = _REFERENCE_BATCH


def muon_adamw(
    config: MuonAdamW, rate: Callable, *, steps: int, size: RunSize
) -> optax.GradientTransformation:
    """Returns the whole update of every parameter, each by its group.

    Args:
      config: rates and scaling.
      rate: step (from 0) -> scheduled `learning_rate`; the others are in proportion.
      steps: of the whole run, over which the weight decay goes to 0.
      size: of the run; `RunSize()` leaves every rate as it is.
    """
    # A batch k times as large has a gradient with 1/k of the noise: rates grow by sqrt
    # k.
    batch = (size.tokens / _REFERENCE_BATCH) ** 0.5
    # Embeddings and the head learn slower in wider models.
    wide = batch * (size.width / _REFERENCE_WIDTH) ** -0.5

    def scheduled(peak: float) -> Callable:
        # One schedule for all groups: its shape times each group's own peak.
        return lambda step: rate(step) * (peak / config.learning_rate)

    def adam(peak: float, b1: float = _BETAS[0]) -> optax.GradientTransformation:
        moments = optax.scale_by_adam(b1=b1, b2=_BETAS[1], eps=1e-10)
        return optax.chain(moments, optax.scale_by_learning_rate(scheduled(peak)))

    # Decay falls with the square of the depth, as in nanochat.
    depth = (_REFERENCE_LAYERS / size.layers) ** 2
    matrices = muon(
        scheduled(config.learning_rate * batch),
        momentum=optax.linear_schedule(*config.momentum, config.momentum_steps),
        decay=optax.linear_schedule(config.weight_decay * depth, 0.0, steps),
        dimensions=matrix_dimensions,
        dtype=jnp.dtype(config.dtype),
    )
    transforms: dict[Hashable, optax.GradientTransformation] = {
        "matrix": matrices,
        "embedding": adam(config.embedding_rate * wide),
        "head": adam(config.head_rate * wide),
        "scalar": adam(config.scalar_rate * batch),
        "residual": adam(config.scalar_rate * batch / 100),
        "input": adam(config.scalar_rate * batch, b1=0.96),
    }
    return optax.partition(transforms, parameter_groups)


def parameter_groups(parameters: Any) -> Any:
    """Returns each parameter's group, by its name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: rule_of(parameter_name(path)).group, parameters
    )


def matrix_dimensions(weights: Any) -> Any:
    """Returns which axes of each weight are inputs and outputs; layers stack before."""

    def of_leaf(path: tuple[Any, ...], weight: Any) -> MuonDimensionNumbers:
        rule = rule_of(parameter_name(path))
        # Leading axes count layers or loops: one matrix each.
        first = weight.ndim - len(rule.spec)
        return MuonDimensionNumbers(
            reduction_axis=tuple(range(first, first + rule.inputs)),
            output_axis=tuple(range(first + rule.inputs, weight.ndim)),
        )

    return jax.tree_util.tree_map_with_path(of_leaf, weights)
