"""A model from elsewhere as a run directory: what `generate` and `evaluate` read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from recurjax.config_json import from_json, to_json
from recurjax.data.config import DataConfig, EmbeddedText, TokenizerFile
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.atomic import new_folder
from recurjax.files.json_files import json_text
from recurjax.model import ModelConfig
from recurjax.parameters import to_nested_dict
from recurjax.training.checkpoint import Checkpoints
from recurjax.training.config import TrainingConfig
from recurjax.training.optimizers import AdamW
from recurjax.training.run import RunDirectory

LONGEST_ROW = 1024
"""Tokens a row of `recurjax evaluate` where the model itself was trained on more."""


def new_experiment(out: Path, config: ModelConfig, *, length: int) -> Experiment:
    """Returns the config of an imported model.

    Its data, optimizer and schedule are defaults that nothing was trained with: a run
    that continues from it names its own.

    Args:
      out: the run directory to be.
      config: the model.
      length: the longest sequence that the model was trained on, where its config does
        not say.
    """
    # Where the config's windows come from a length, rows must have it; else a row that
    # fits a usual machine.
    row = config.training_length or min(length, LONGEST_ROW)
    return Experiment(
        name=out.absolute().name,
        model=config,
        data=DataConfig(
            corpus=EmbeddedText(),
            tokenizer=TokenizerFile(path=str(out / "tokenizer")),
        ),
        training=TrainingConfig(steps=1, batch=8, length=row),
        optimizer=AdamW(learning_rate=1e-5),
    )


def write_run(
    out: Path,
    model: Any,
    experiment: Experiment,
    tokenizer: Tokenizer,
    *,
    step: int = 0,
    parity: dict[str, Any] | None = None,
    base: dict[str, Any] | None = None,
    extra: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Writes a run directory whose one checkpoint holds the parameters and no more.

    Args:
      out: where; it is written atomically.
      model: the parameters; of adapters what is trained of the model.
      experiment: becomes config.json.
      tokenizer: becomes tokenizer/.
      step: step of the checkpoint.
      parity: becomes parity.json.
      base: base model of adapters, see `Manifest`.
      extra: writes further files into the folder that it is given.

    Raises:
      UserError: `out` is taken, or the disk is full.
    """
    # Written and read once, so that what is wrong shows now and not at the first use.
    experiment = from_json(Experiment, to_json(experiment), path="config")
    with whole_directory(out) as aside:
        directory = RunDirectory(aside)
        directory.claim(experiment, tokenizer)
        # The mark by which training knows that there is no optimizer state.
        directory.imported.write_text(
            "written by recurjax convert: parameters only\n", encoding="utf-8"
        )
        checkpoints = Checkpoints(directory.checkpoints, model=experiment.model)
        try:
            # The model alone: a run that starts from it makes its own optimizer state.
            tree = {"model": to_nested_dict(model)}
            checkpoints.save(step, tree, data_state={}, base=base)
        finally:
            checkpoints.close()
        if parity is not None:
            text = json_text(parity, indent=2) + "\n"
            (aside / "parity.json").write_text(text, encoding="utf-8")
        extra(aside)


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Gives a directory aside, which takes the place `out` when the block ends well.

    Raises:
      UserError: something other than an empty folder is at `out`, or the disk does not
        take it.
    """
    try:
        with new_folder(out) as aside:
            yield aside
    # Safetensors raises a class of its own where the disk is full.
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{out.absolute()} could not be written: {reason}") from error
