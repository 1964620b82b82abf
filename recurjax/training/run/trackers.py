"""Services that show metrics of many runs beside each other: wandb and MLflow.

Both know a run by an id. It is kept in the run directory, so that a resumed run goes on
where it was, and another run of the same name is another one.
"""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from recurjax.errors import UserError
from recurjax.files.whole import write_whole
from recurjax.training.config import TrainingConfig


@runtime_checkable
class Tracker(Protocol):
    """A service that gets this process' metrics; rows of one step may come in parts."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends finite and other numbers, each under `kind/name`."""
        ...

    def close(self) -> None:
        """Sends what is left and ends the run there."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What a tracker is told of a run.

    Attributes:
      name: of the run directory.
      config: the resolved experiment, as config.json has it.
      start: this start of the run, as the last row of starts.jsonl has it.
      ids: the file of the run directory that keeps the run's id in each service.
    """

    name: str
    config: dict[str, Any]
    start: dict[str, Any]
    ids: Path


def open_trackers(training: TrainingConfig, description: Description) -> list[Tracker]:
    """Opens what `training` asks for.

    Raises:
      UserError: a package is not installed, or its service refuses the run.
    """
    kinds: list[type[Wandb] | type[Mlflow]] = []
    if training.wandb_project is not None:
        kinds.append(Wandb)
    if training.mlflow_experiment is not None:
        kinds.append(Mlflow)
    trackers: list[Tracker] = []
    for kind in kinds:
        # An error here is the user's to mend, before anything is trained.
        try:
            trackers.append(kind(training, description))
        except (UserError, OSError):
            raise
        except Exception as error:  # of each service's own classes
            text = " ".join(str(error).split())
            raise UserError(
                f"{kind.__name__} does not take the run: {text[:1000]}"
            ) from error
    return trackers


class Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps everything on disk."""

    def __init__(self, training: TrainingConfig, description: Description):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                "training.wandb_project needs wandb: pip install 'recurjax[wandb]'"
            ) from error
        self._run: Any = wandb.init(
            project=training.wandb_project,
            name=description.name,
            id=_known_id(description.ids, "wandb") or _new_id(description.ids, "wandb"),
            resume="allow",
            group=training.wandb_group,
            tags=list(training.wandb_tags) or None,
            config=description.config | {"start": description.start},
            dir=str(description.ids.parent),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow; MLFLOW_TRACKING_URI names the server or folder."""

    def __init__(self, training: TrainingConfig, description: Description):
        try:
            import mlflow  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                "training.mlflow_experiment needs mlflow: "
                "pip install 'recurjax[mlflow]'"
            ) from error
        self._mlflow: Any = mlflow
        mlflow.set_experiment(training.mlflow_experiment)
        known = _known_id(description.ids, "mlflow")
        if known is not None:
            mlflow.start_run(run_id=known)
        else:
            run = mlflow.start_run(run_name=description.name)
            _note_id(description.ids, "mlflow", run.info.run_id)
        tags = {k: str(v) for k, v in description.start.items() if v is not None}
        mlflow.set_tags(tags)
        mlflow.log_dict(description.config, "config.json")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: x for name, x in metrics.items() if math.isfinite(x)}
        self._mlflow.log_metrics(finite, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _known_id(ids: Path, service: str) -> str | None:
    return _ids(ids).get(service)


def _new_id(ids: Path, service: str) -> str:
    made = secrets.token_hex(4)
    _note_id(ids, service, made)
    return made


def _note_id(ids: Path, service: str, made: str) -> None:
    write_whole(ids, json.dumps(_ids(ids) | {service: made}) + "\n")


def _ids(ids: Path) -> dict[str, str]:
    try:
        found = json.loads(ids.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(
            f"{ids} is not valid JSON: {error}; remove it to begin a new run there"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{ids} is no JSON object: remove it to begin a new run there")
    return {k: v for k, v in found.items() if isinstance(v, str)}
