"""One experiment: everything that a run is made from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from recurjax.config_json import from_json, json_differences, to_json
from recurjax.data.config import DataConfig, Mixture
from recurjax.data.tasks.dataset import TaskData
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import read_json
from recurjax.layers.position import LearnedPositions
from recurjax.model import ModelConfig
from recurjax.sharding import MeshConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.objective import (
    NextToken,
    Objective,
    RandomLoops,
    as_carried,
    refuses_segments,
)
from recurjax.training.optimizers import Constant, OptimizerConfig, Schedule
from recurjax.version import VERSION, refuse_newer


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """The full configuration of a run.

    Attributes:
      name: name of the run, and of its directory under `runs/`.
      model: the model to train.
      data: the training data: a corpus and its tokenizer, or a synthetic task.
      training: length of the run, batch size, checkpoints and logging.
      optimizer: the optimizer and its peak learning rate.
      schedule: the learning rate over the run, as a factor of the peak.
      objective: the loss.
      mesh: how devices share the batch and the model.
      evaluation: how often to compute the validation loss and to sample texts.
    """

    name: str
    model: ModelConfig
    data: DataConfig | TaskData
    training: TrainingConfig
    optimizer: OptimizerConfig
    schedule: Schedule = field(default_factory=Constant)
    objective: Objective = field(default_factory=NextToken)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self):
        unfit = self.name in ("", ".", "..") or "\0" in self.name
        if unfit or Path(self.name).name != self.name:
            raise ValueError(
                "name must be usable as the name of a directory under runs/, got "
                f"{self.name!r}"
            )
        training, length = self.training, self.training.row_length
        fix = f"shorten it or raise {_learned_positions(self.model, 'model')}.length"
        what = f"training.length {training.length}"
        if training.carry > 1:
            what += f" x training.carry {training.carry} = {length}"
        too_long = self.model.refuses_length(length, what, fix=fix)
        if too_long is not None:
            raise ValueError(too_long)
        # Windows of a pattern such as "half of the length" were computed for one
        # length.
        windows = self.model.training_length
        if windows not in (None, training.length):
            raise ValueError(
                f"training.length {training.length} must equal "
                f"model.stack.length {windows}, from which the model's windows "
                "follow: set both to the same value"
            )
        refused = self.objective.refuses(self.model)
        if refused is None and self.has_segments:
            refused = refuses_segments(self.objective, self.model)
        if refused is None and training.carry > 1:
            refused = self._refuses_carry()
        if refused is None and training.spikes.enabled:
            refused = self._refuses_spikes()
        if refused is not None:
            raise ValueError(refused)

    def _refuses_spikes(self) -> str | None:
        if not isinstance(self.objective, RandomLoops):
            return None
        return (
            "RandomLoops draws a number of loops at each step, and the losses of few "
            "loops would be skipped as spikes: set training.spikes.enabled to false"
        )

    def _refuses_carry(self) -> str | None:
        if as_carried(self.objective) is None:
            return (
                "training.carry needs an objective of one pass, NextToken or Chunked, "
                f"got {type(self.objective).__name__}"
            )
        if self.has_segments:
            return (
                "training.carry continues rows with a cache, which keeps no documents "
                "apart: leave data.document_segments off (for prompts with answers: "
                "rows one)"
            )
        in_turns = isinstance(self.data, TaskData) and self.data.order == "settings"
        if self.data_changes or in_turns:
            return (
                "training.carry reads a batch of rows in several steps, so the data "
                "cannot change by the step: leave out a mixture's reweightings, "
                "data.stages and data.order settings"
            )
        return None

    @property
    def has_segments(self) -> bool:
        """Whether its batches carry segments."""
        return self.data.has_segments

    @property
    def data_changes(self) -> tuple[int, ...]:
        """The steps from which on a mixture or a task draws other rows."""
        if isinstance(self.data, TaskData):
            return self.data.stages[1:]
        if not isinstance(self.data.corpus, Mixture):
            return ()
        return tuple(change.step for change in self.data.corpus.reweightings)

    @property
    def evaluation_batch(self) -> int:
        """Rows that an evaluation runs at a time."""
        training = self.training
        return self.evaluation.batch or training.batch // training.accumulation

    @property
    def flops_per_token(self) -> float:
        """Returns the training FLOPs per token of all passes and all other work."""
        length, objective = self.training.row_length, self.objective
        flops = objective.passes * self.model.flops_per_token(length)
        return flops + objective.beside_flops(self.model, length)


def _learned_positions(config: Any, path: str) -> str | None:
    """Returns the dotted name of the field that holds learned positions."""
    if isinstance(config, LearnedPositions):
        return path
    if not is_dataclass(config):
        return None
    inner = (
        _learned_positions(getattr(config, part.name), f"{path}.{part.name}")
        for part in fields(config)
    )
    return next((name for name in inner if name is not None), None)


def write_experiment(experiment: Experiment, file: Path) -> None:
    """Writes config.json atomically."""
    content = {VERSION_KEY: VERSION, **to_json(experiment)}
    write_atomic(file, json.dumps(content, indent=2) + "\n")


def read_experiment(file: Path) -> Experiment:
    """Reads config.json back.

    Raises:
      UserError: it is missing, is not JSON, does not fit this version's configs or was
        written by a newer one.
    """
    if not file.is_file():
        raise UserError(f"{file.parent} is not a run directory: it has no {file.name}")
    data = read_json(file, "the run's config")
    return from_json(Experiment, brought_up_to_date(data, file), path=file.name)


def differences(before: Experiment, other: Experiment) -> list[str]:
    """Lists fields that differ, as `a.b: 1 instead of 2` (one's value, other's)."""
    return json_differences(to_json(before), to_json(other))


def model_differences(before: ModelConfig, other: ModelConfig) -> list[str]:
    """Lists what makes two models different functions of their parameters.

    How parameters start, dtypes of activations and the order of a computation do not
    count.
    """
    return json_differences(_function(to_json(before)), _function(to_json(other)))


_NOT_THE_FUNCTION = {
    *("init", "dtype", "remat", "unroll", "implementation", "schedule", "tile"),
    "gate_horizon",  # of RAT's gates: how their biases start
    *("hf_family", "weight_dtype"),  # where it comes from, how it is stored
}
"""Fields of a model's configs, by name, that its function does not depend on."""


def _function(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            name: _function(value)
            for name, value in config.items()
            if name not in _NOT_THE_FUNCTION
        }
    return [_function(item) for item in config] if isinstance(config, list) else config


VERSION_KEY = "recurjax"
"""In config.json next to the experiment's fields: the version that wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldChange:
    """A field of a config class that has another name, another place, or is no more.

    Attributes:
      version: the first without the old field.
      type: the class, as JSON names it.
      field: the old field.
      to: its place now, dotted from the same object ("stack.remat"); None: it went.
      only: the one value that the field may have had where it went, as what it did is
        done no more; None: any.
    """

    version: str
    type: str
    field: str
    to: str | None = None
    only: Any = None


CHANGES: tuple[FieldChange, ...] = ()
"""Fields of configs that moved or went since a version, oldest first.

config.json says which version wrote it. `read_experiment` brings an older file up to
date before it decodes it, so that the configs know their present fields only, and
refuses a newer file by its version. A commit that moves a field adds a row.
"""


def brought_up_to_date(
    data: Any, file: Path, *, changes: Sequence[FieldChange] | None = None
) -> Any:
    """Returns a config's JSON with the fields of this version, less the version.

    Args:
      data: what the file holds; a file without a version is older than all changes.
      file: for messages.
      changes: None: CHANGES.

    Raises:
      UserError: a newer version wrote it, or a field that went had a value that this
        version cannot do.
    """
    if not isinstance(data, dict):
        return data
    data = dict(data)
    version = data.pop(VERSION_KEY, "")
    refuse_newer(version, file)
    written_by = Version(version or "0")
    for change in CHANGES if changes is None else changes:
        if written_by < Version(change.version):
            data = _changed(data, change, file)
    return data


def _changed(value: Any, change: FieldChange, file: Path) -> Any:
    if isinstance(value, list):
        return [_changed(item, change, file) for item in value]
    if not isinstance(value, dict):
        return value
    # Inner objects first: a field may move out of one that moved itself.
    value = {name: _changed(item, change, file) for name, item in value.items()}
    if value.get("type") != change.type or change.field not in value:
        return value
    old = value.pop(change.field)
    if change.to is not None:
        *path, last = change.to.split(".")
        inner = value
        for name in path:
            inner = inner[name]
        inner[last] = old
    elif change.only is not None and old != change.only:
        raise UserError(
            f"{file}: {change.type}.{change.field} was {old!r}; since version "
            f"{change.version} only {change.only!r} can be done"
        )
    return value
