"""Reads back what `to_torch` wrote, also after training in PyTorch."""

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from recurjax.config_json import from_json
from recurjax.convert.formats.safetensors_files import open_directory
from recurjax.convert.hugging_face.keys import read_keys
from recurjax.convert.loading import load_model
from recurjax.convert.torch.export import FORMAT
from recurjax.convert.torch.names import torch_pieces
from recurjax.data.tokenizers import load_tokenizer
from recurjax.errors import UserError
from recurjax.experiment import Experiment, model_differences
from recurjax.model import ModelConfig
from recurjax.ranges import LARGEST_SIZE
from recurjax.training.run import LoadedRun


def from_torch(
    directory: Path,
    *,
    mesh: Mesh | None = None,
    report: Callable[[str], None] = print,
) -> LoadedRun:
    """Loads an export.

    Args:
      directory: with config.json, model.safetensors and a tokenizer.
      mesh: where to lay the parameters out; None: on one device.
      report: gets a sentence when weights are not finite.

    Raises:
      UserError: it is no export, its tensors are not the model's, or config.json was
        edited so that model and experiment do not agree.
    """
    file = directory / "config.json"
    keys = read_keys(file)
    if keys.get("format") != FORMAT:
        raise UserError(
            f"{file} is no export of this version of recurjax: its format is "
            f"{keys.get('format')!r}, not {FORMAT!r}"
        )
    missing = [name for name in ("model", "experiment", "step") if name not in keys]
    # Each is named, so that a file of another kind is told apart from a damaged one.
    if missing:
        raise UserError(f"{file} lacks {', '.join(missing)}")
    step = keys["step"]
    if type(step) is not int or not 0 <= step <= LARGEST_SIZE:
        raise UserError(f"{file}: step must be a number of steps, got {step!r:.60}")
    config = from_json(ModelConfig, keys["model"], path="model")
    # The experiment beside the model, so that a run can go on from it.
    experiment = from_json(Experiment, keys["experiment"], path="experiment")
    if changed := model_differences(config, experiment.model):
        raise UserError(
            f"{file}: model and experiment.model differ: {'; '.join(changed)}"
        )
    tokenizer = load_tokenizer(directory)
    source = open_directory(directory)
    # The tensors' names and shapes come from the model, not from the file.
    model = load_model(config, torch_pieces(config), source, mesh=mesh, report=report)
    return LoadedRun(experiment, model, tokenizer, step)
