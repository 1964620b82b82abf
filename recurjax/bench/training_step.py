"""The row that times a complete training step, as `recurjax train` runs it."""

from dataclasses import dataclass
from typing import Any

import jax

from recurjax.bench.timing import BenchRow, repeat, row
from recurjax.model import Decoder, ModelConfig
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training.config import TrainingConfig
from recurjax.training.objective import NextToken, Objective
from recurjax.training.optimizers import Constant, OptimizerConfig, Schedule
from recurjax.training.program import Step, build_step
from recurjax.training.step import TrainState
from recurjax.types import Batch

_STEPS = 1000  # Of a run that never ends: optimizers that schedule by them want some.


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchedRun:
    """A run without data: what of an `Experiment` makes a step.

    Attributes:
      model, optimizer, objective: as an experiment's.
      batch, length: B rows of T tokens.
      clip: largest global norm of the gradient, or None.
      training, schedule: made from these; the rate is constant.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    batch: int
    length: int
    objective: Objective = NextToken()
    clip: float | None = None

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(
            steps=_STEPS,
            batch=self.batch,
            length=self.length,
            gradient_clip=self.clip,
        )

    @property
    def schedule(self) -> Schedule:
        return Constant()

    @property
    def has_segments(self) -> bool:
        return False

    @property
    def evaluation_batch(self) -> int:
        return self.batch


def one_device_step(run: BenchedRun) -> Step:
    """Builds the run's step for the first device."""
    return build_step(run, make_mesh(MeshConfig(), jax.devices()[:1]))


def random_batch(run: BenchedRun) -> Batch:
    """Draws rows of tokens; the next ones are their targets."""
    # T + 1 tokens per row give T inputs and, one place further, their T targets.
    shape = (run.batch, run.length + 1)
    ids = jax.random.randint(jax.random.key(1), shape, 0, run.model.vocabulary)
    return Batch(ids[:, :-1], ids[:, 1:])


def step_row(
    name: str,
    step: Step,
    state: TrainState,
    batch: Batch,
    *,
    shape: dict[str, int],
    dtype: str,
    repeats: int,
    frozen: Decoder | None = None,
) -> BenchRow:
    """Times steps on one batch, each from the state that the one before left.

    Args:
      name: name of the row.
      step: from `one_device_step`.
      state: used up.
      batch: from `random_batch`.
      shape, dtype, repeats: as every row's.
      frozen: the objective's frozen model, if it has one.
    """
    # A step uses its state up (its buffers are donated), so each call gives the next
    # one its own.
    held = [state]

    def advance() -> Any:
        held[0], metrics = step(held[0], batch, frozen)
        return metrics

    times = repeat(advance, repeats=repeats)
    return row(name, shape, dtype, times, tokens=batch.ids.size)
