"""`recurjax evaluate RUN [--text FILE]`: loss, perplexity, bits per byte, as JSON."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from recurjax.cli.options import parse
from recurjax.data.config import DataConfig, TextFiles
from recurjax.data.dataset import open_dataset
from recurjax.errors import UserError
from recurjax.evaluation.perplexity import score
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training.placement import placed
from recurjax.training.run_directory import load_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Scores a text with a trained model and prints JSON.

    Attributes:
      run: the run directory.
      text: a text file; without one, a split of the run's own data.
      split: of the data, without `text`.
      length: tokens a row; each row starts without context. None: as in training.
      batch: rows at a time.
      step: of the checkpoint; None: the newest.
      json: also write the JSON to this file.
    """

    run: Annotated[Path, tyro.conf.Positional]
    text: Path | None = None
    split: Literal["validation", "train"] = "validation"
    length: int | None = None
    batch: int = 32
    step: int | None = None
    json: Path | None = None

    def __post_init__(self):
        if self.batch < 1 or (self.length is not None and self.length < 1):
            raise UserError(
                "--batch and --length must be at least 1, got "
                f"{self.batch} and {self.length}"
            )
        if self.json is not None and not self.json.parent.is_dir():
            raise UserError(f"--json: there is no directory {self.json.parent}")


def run(argv: list[str]) -> int:
    """Runs the command."""
    options = parse(Evaluate, argv, prog="recurjax evaluate")
    loaded = load_run(options.run, step=options.step, report=_say)
    experiment = loaded.experiment
    data = experiment.data
    if options.text is not None:
        data = DataConfig(
            corpus=TextFiles(patterns=(str(options.text),)),
            tokenizer=data.tokenizer,
            validation_fraction=1.0,
        )
    dataset = open_dataset(data, tokenizer=loaded.tokenizer)
    length = options.length or experiment.training.length
    longest = experiment.model.max_length
    if longest is not None and length > longest:
        raise UserError(
            f"--length {length} exceeds the model's {longest} learned positions"
        )
    split = "validation" if options.text is not None else options.split
    loader = dataset.loader(split, length=length, batch=options.batch, in_order=True)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    result = score(
        loaded.model,
        placed(iter(loader), mesh, batch=options.batch),
        token_bytes=loaded.tokenizer.token_bytes,
        chunks=experiment.objective.vocabulary_chunks,
    )
    report = {
        "run": str(options.run),
        "step": loaded.step,
        "text": f"{split} split" if options.text is None else str(options.text),
        "length": length,
        **result._asdict(),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json is not None:
        aside = options.json.with_name(options.json.name + ".partial")
        aside.write_text(text + "\n")
        aside.replace(options.json)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)
