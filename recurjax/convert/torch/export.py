"""Writes a run out: a PyTorch module that stands by itself, or a Hugging Face model."""

import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int

from recurjax.config_json import to_json
from recurjax.convert import parity
from recurjax.convert.formats.safetensors_files import SINGLE
from recurjax.convert.hugging_face.names import hf_pieces
from recurjax.convert.hugging_face.write_config import exported, hf_keys
from recurjax.convert.output_directory import whole_directory
from recurjax.convert.parity import NotMeasured, Parity
from recurjax.convert.saving import write_tensors
from recurjax.convert.torch.names import torch_pieces
from recurjax.convert.torch.source import HF_REFERENCE, TEMPLATES, torch_source
from recurjax.data.tokenizers import JsonTokenizer, Tokenizer
from recurjax.errors import UserError
from recurjax.files.json_files import json_text
from recurjax.model import Decoder
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.training.run import LoadedRun

FORMAT = "recurjax-torch-1"
MODULE = "modeling_recurjax.py"
REPORT = "parity.json"
Check = Parity | NotMeasured


def to_torch(
    run: LoadedRun,
    out: Path,
    *,
    format: Literal["torch", "hf"] = "torch",
    check: bool = True,
    python: str | None = None,
    ids: Int[np.ndarray, "B T"] | None = None,
    tolerance: float = parity.TOLERANCE,
) -> Check:
    """Writes model.safetensors, config.json, the tokenizer and parity.json.

    With format "torch" also `modeling_recurjax.py`, which loads them with torch,
    safetensors and numpy only; format "hf" is what transformers loads by itself.

    Args:
      run: a loaded run.
      out: the directory; it appears whole or not at all.
      format: see above.
      check: compare both sides; False: parity.json says that nothing was measured.
      python: an interpreter with torch; None: this one, if it has.
      ids: see `compare`.
      tolerance: see `Parity`.

    Raises:
      UserError: the variant has no PyTorch module, or is none of Hugging Face's
        architectures; `out` is taken; the disk is full; the PyTorch side fails.
    """
    # Asked before anything is written.
    config = run.model.config
    if format == "torch" and type(config.stack) not in TEMPLATES:
        raise UserError(
            f"{type(config.stack).__name__} has no PyTorch module yet: known are "
            f"{', '.join(kind.__name__ for kind in TEMPLATES)}"
        )
    if config.row_decoder:
        raise UserError(
            "a model with a row decoder, which the objective Compress trains, tells "
            "rows and no next tokens: it has no PyTorch module"
        )
    keys = _config(run) if format == "torch" else _hf_config(run)
    model = run.model if format == "torch" else exported_model(run.model)
    with whole_directory(out) as aside:
        if format == "torch":
            pieces = torch_pieces(config)
            (aside / MODULE).write_text(torch_source(config.stack), encoding="utf-8")
        else:
            pieces = hf_pieces(keys["model_type"], model.config)
        write_tensors(model, pieces, aside / SINGLE)
        _write_json(aside / "config.json", keys)
        tokenizer = run.tokenizer
        if isinstance(tokenizer, JsonTokenizer):
            tokenizer = tokenizer.restated()
        tokenizer.save(aside)
        found = (
            _compare(run, aside, format, python, ids, tolerance)
            if check
            else NotMeasured(reason="not asked for")
        )
        _write_json(aside / REPORT, found.to_json())
    return found


def compare_with_export(run: LoadedRun, directory: Path, **options: Any) -> Check:
    """Compares a run with an export's weights in PyTorch; see `compare`.

    The module that reads them is written anew from the run's config. The one in the
    directory is not run: importing weights must not execute what came with them.
    """
    # Into a folder that goes away: the module is only for this comparison.
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / MODULE
        source = torch_source(run.model.config.stack)
        module.write_text(source, encoding="utf-8")
        command = [str(module), "--directory", str(directory.absolute())]
        return parity.compare(run.model, command, **options)


def compare_with_hf(
    model: Decoder, path: Path, *, tokenizer: Tokenizer | None = None, **options: Any
) -> Check:
    """Compares a model with what transformers makes of a directory; see `compare`.

    Every row of the exported head is compared, and the tokens of some texts where the
    directory has a tokenizer.json.
    """
    command = [str(HF_REFERENCE), "--directory", str(path)]
    has_file = path.is_dir() and (path / "tokenizer.json").is_file()
    read = tokenizer if has_file and isinstance(tokenizer, JsonTokenizer) else None
    return parity.compare(exported_model(model), command, tokenizer=read, **options)


def exported_model(model: Decoder) -> Decoder:
    """Returns the model that Hugging Face's format can say: see `exported`."""
    config = exported(model.config)
    values = to_nested_dict(model)
    V = config.vocabulary
    values["w_embedding"] = values["w_embedding"][:V]
    if "w_head" in values:
        values["w_head"] = values["w_head"][:, :V]
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return from_nested_dict(like, values)


def _compare(
    run: LoadedRun,
    directory: Path,
    format: str,
    python: str | None,
    ids: Int[np.ndarray, "B T"] | None,
    tolerance: float,
) -> Check:
    options = {"python": python, "ids": ids, "tolerance": tolerance}
    if format == "hf":
        return compare_with_hf(run.model, directory, tokenizer=run.tokenizer, **options)
    return compare_with_export(run, directory, **options)


def _config(run: LoadedRun) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": run.step,
        "model": to_json(run.model.config),
        "experiment": to_json(run.experiment),
    }


def _hf_config(run: LoadedRun) -> dict[str, Any]:
    return hf_keys(
        run.model.config,
        # A Hugging Face model names its longest sequence; at least a usual one.
        length=max(run.experiment.training.length, 2048),
        bos=run.tokenizer.bos,
        eos=run.tokenizer.eos,
        pad=run.tokenizer.pad,
    )


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json_text(values, indent=2) + "\n", encoding="utf-8")
