"""One experiment: everything that a run is made from."""

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from recurjax.config_json import from_json, json_differences, to_json
from recurjax.data.config import DataConfig
from recurjax.errors import UserError
from recurjax.files import write_whole
from recurjax.layers.position import LearnedPositions
from recurjax.model import ModelConfig
from recurjax.sharding import MeshConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.objective import NextToken, Objective
from recurjax.training.optimizer import OptimizerConfig
from recurjax.training.schedule import Constant, Schedule

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A run's whole configuration.

    Attributes:
      name: the run directory's name under `runs/`.
      model: what to train.
      data: what on.
      training: how long, in what portions.
      optimizer, schedule, objective, mesh, evaluation: as their classes say.
    """

    name: str
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    schedule: Schedule = field(default_factory=Constant)
    objective: Objective = field(default_factory=NextToken)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self):
        if Path(self.name).name != self.name or self.name in ("", ".", ".."):
            raise ValueError(
                f"name must be fit for a directory under runs/, got {self.name!r}"
            )
        longest = self.model.max_length
        if longest is not None and self.training.length > longest:
            raise ValueError(
                f"training.length {self.training.length} exceeds the model's {longest} "
                "learned positions: shorten it or raise "
                f"{_learned_positions(self.model, 'model')}.length"
            )
        windows = self.model.training_length
        if windows not in (None, self.training.length):
            raise ValueError(
                f"training.length {self.training.length} is not model.stack.length "
                f"{windows}, from which the model's windows come: set both alike"
            )

    @property
    def evaluation_batch(self) -> int:
        """Rows that an evaluation runs at a time."""
        training = self.training
        return self.evaluation.batch or training.batch // training.accumulation

    @property
    def flops_per_token(self) -> float:
        """Counts training FLOPs a token, in all passes of the objective."""
        return self.objective.passes * self.model.flops_per_token(self.training.length)


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


def load_experiment(path: Path) -> Experiment:
    """Runs an experiment file and returns what its `config()` does.

    Raises:
      UserError: no such file, it fails, it has no `config`, or that returns something
        else or an Experiment with a value of a wrong type.
    """
    if not path.is_file():
        raise UserError(
            f"no experiment file at {path}: name a .py file with a config()"
        )
    name = f"_experiment_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file: name a .py file with a config()")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the file look their module up
    loader = spec.loader
    # Files beside it can be imported, as when Python runs it.
    sys.path.insert(0, str(path.parent.absolute()))
    _run(path, lambda: loader.exec_module(module))
    if not callable(getattr(module, "config", None)):
        raise UserError(f"{path} has no function config() that returns an Experiment")
    experiment = _run(path, module.config)
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"config() in {path} must return an Experiment, not "
            f"{type(experiment).__name__}"
        )
    # As it will be read back from config.json: wrong types show here, by their names.
    return _run(path, lambda: from_json(Experiment, to_json(experiment), path="config"))


def _run(path: Path, action: Callable[[], T]) -> T:
    """Runs code of an experiment file; what goes wrong becomes one sentence."""
    try:
        return action()
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise UserError(f"{where} does not parse: {error.msg}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f.lineno for f in frames if Path(f.filename) == path.absolute()]
        where = f"{path}, line {own[-1]}" if own else f"{path}"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{where}: {kind}{first_line}") from error


def write_experiment(experiment: Experiment, file: Path) -> None:
    """Writes config.json, whole or not at all."""
    write_whole(file, json.dumps(to_json(experiment), indent=2) + "\n")


def read_experiment(file: Path) -> Experiment:
    """Reads config.json back.

    Raises:
      UserError: it is missing, is not JSON or does not fit this version's configs.
    """
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise UserError(
            f"{file.parent} is not a run directory: no {file.name}"
        ) from error
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    return from_json(Experiment, data, path=file.name)


def differences(one: Experiment, other: Experiment) -> list[str]:
    """Lists fields that differ, as `a.b: 1 instead of 2` (one's value, other's)."""
    return json_differences(to_json(one), to_json(other))


def model_differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Lists what makes two models different functions of their parameters.

    How parameters start, dtypes of activations and the order of a computation do not
    count.
    """
    return json_differences(_function(to_json(one)), _function(to_json(other)))


_NOT_THE_FUNCTION = {
    *("init", "dtype", "remat", "unroll", "implementation", "schedule", "tile"),
    "gate_horizon",  # of RAT's gates: how their biases start
}


def _function(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            name: _function(value)
            for name, value in config.items()
            if name not in _NOT_THE_FUNCTION
        }
    return [_function(item) for item in config] if isinstance(config, list) else config
