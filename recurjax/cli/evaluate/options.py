"""Options and results that all kinds of evaluation share."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import Mesh

from recurjax.errors import UserError
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.rows import Row
from recurjax.model import WeightDtype
from recurjax.ranges import NonNegativeInt, PositiveInt, check_ranges
from recurjax.sharding import MeshConfig
from recurjax.training.run import LoadedRun

Figures = tuple[dict[str, Any], list[Row]]
"""What the command prints, and the rows that the run keeps."""

Measure = Callable[[LoadedRun, Mesh | None, Journal], Figures]
"""An evaluation whose inputs are read. The mesh is None on one device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Options of every kind of evaluation.

    Attributes:
      run: the run directory, also in a bucket (gs://, s3://), or
        hf:OWNER/NAME[@REVISION] of the Hugging Face Hub.
      step: training step of the checkpoint; None: the newest.
      loops: run a recursive model's block this many times; None: as in training.
      weights: dtype of the weights in memory: int8 or int4 (64 inputs share a scale;
        tables in int8), q8_0, q4_0 or q4_1 (GGUF's groups of 32; tables in q8_0), with
        -layers tables unchanged; None: as stored.
      json: also write the JSON to this file.
    """

    run: Annotated[Path, tyro.conf.Positional]
    step: NonNegativeInt | None = None
    loops: PositiveInt | None = None
    weights: WeightDtype | None = None
    json: Path | None = None

    # Checked before a model is read, not after an hour of scoring.
    def __post_init__(self):
        check_ranges(self)
        require_folder("json", self.json)

    @property
    def devices(self) -> MeshConfig:
        """The devices that hold the model; one for a kind without --mesh."""
        return MeshConfig(data=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnMesh(Evaluation):
    """Options of every kind that runs on several devices.

    Attributes:
      mesh: devices that hold the model; the first of several processes reports.
    """

    mesh: MeshConfig = MeshConfig(data=1)

    @property
    def devices(self) -> MeshConfig:
        return self.mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark(OnMesh):
    """Options of benchmarks of prompts.

    Attributes:
      batch: rows per batch.
      limit: items per task; None: all.
      bos: put the tokenizer's BOS, if it has one, before each prompt.
    """

    batch: PositiveInt = 32
    limit: PositiveInt | None = None
    bos: bool = True


def evaluator_of(
    options: Benchmark,
    loaded: LoadedRun,
    mesh: Mesh | None,
    journal: Journal,
    length: int | None,
) -> Evaluator:
    """Returns the run's model with a scorer and an answerer.

    Args:
      length: tokens of its window; None: its learned positions, else as in training.

    Raises:
      UserError: the window exceeds the model's learned positions.
    """
    config = loaded.model.config
    window = length or config.max_length or loaded.experiment.training.length
    if (reason := config.refuses_length(window, f"--length {window}")) is not None:
        raise UserError(reason)
    return Evaluator(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        step=loaded.step,
        mesh=mesh,
        rows=options.batch,
        window=window,
        bos=options.bos,
        journal=journal,
    )


def require_folder(name: str, file: Path | None) -> None:
    """Raises UserError if the folder of an output file does not exist."""
    if file is not None and not file.parent.is_dir():
        raise UserError(f"--{name}: there is no directory {file.parent}")


def log(text: str) -> None:
    """Writes a line to standard error, of the first process alone."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr)
