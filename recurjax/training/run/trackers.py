"""Describes a run to wandb and MLflow, and in starts.jsonl.

Both know a run by an id. It is kept in the run directory, so that a resumed run
continues where it was, and another run of the same name is another one.
"""

import json
import math
import os
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import read_json_object
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
    """The description of a run for a tracker.

    Attributes:
      name: name of the run directory.
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
                f"{kind.__name__} refuses the run: {text[:1000]}"
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
    new = secrets.token_hex(4)
    _note_id(ids, service, new)
    return new


def _note_id(ids: Path, service: str, new: str) -> None:
    write_atomic(ids, json.dumps(_ids(ids) | {service: new}) + "\n")


def _ids(ids: Path) -> dict[str, str]:
    if not ids.is_file():
        return {}
    try:
        values = read_json_object(ids, "the file of the trackers' ids")
    except UserError as error:
        raise UserError(f"{error}; remove it to start a new run there") from error
    return {k: v for k, v in values.items() if isinstance(v, str)}


_GIT_SECONDS = 10.0


def note_start(file: Path, *, step: int) -> dict[str, Any]:
    """Appends this start to the file and returns its row.

    A row has the time, the step that training begins or resumes at, the commit checked
    out where the command was given and whether files differ from it (null: no git, or
    no repository), the versions of jax and jaxlib, and how many devices of which kind
    in how many processes.
    """
    # Of where the command was given: that is the code that the user works on.
    commit, dirty = git_state(Path.cwd())
    row = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "step": step,
        "commit": commit,
        "dirty": dirty,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }
    with file.open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")
    return row


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Returns the commit checked out in a folder, and whether tracked files differ.

    Untracked files do not count: runs are written next to the code.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None, None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit.strip(), None if changed is None else bool(changed.strip())


def _git(folder: Path, *words: str) -> str | None:
    # No prompts, locks or fetches: training must not wait for its repository.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            env=env,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
