"""A Hugging Face directory, or a GGUF file, as a recurjax model."""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jax.sharding import Mesh

from recurjax.convert.formats.safetensors_files import open_directory
from recurjax.convert.formats.tensors import QuantizedSource, TensorSource
from recurjax.convert.hugging_face.families import FAMILIES
from recurjax.convert.hugging_face.keys import read_keys
from recurjax.convert.hugging_face.names import (
    hf_pieces,
    ignored_tensors,
    tied_tensors,
    with_usual_names,
)
from recurjax.convert.hugging_face.read_config import HfModel, model_from_keys
from recurjax.convert.loading import load_model
from recurjax.data.tokenizers import (
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
    read_text_settings,
)
from recurjax.errors import UserError
from recurjax.machine import host
from recurjax.model import Decoder, ModelConfig


class Imported(NamedTuple):
    """A model and what came with it.

    Attributes:
      model: the parameters; `model.config` is the config.
      tokenizer: with the chat template and generation_config.json of the checkpoint;
        None where it has no tokenizer.json and none was named.
      architecture: Hugging Face's `model_type`.
      length: the longest sequence that the model was trained on, in tokens.
    """

    model: Decoder
    tokenizer: Tokenizer | None
    architecture: str
    length: int


def from_hf(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: Literal["float32", "bfloat16", "keep", "float64"] = "float32",
    mesh: Mesh | None = None,
    ignored_keys: Collection[str] = (),
    report: Callable[[str], None] = print,
) -> Imported:
    """Loads a pretrained model; torch is not needed.

    The model's vocabulary is its tokenizer's: rows of the tables beyond it are padding,
    which is kept and never predicted.

    Args:
      path: a directory with config.json and safetensors, or a .gguf file (needs the
        package `gguf`), whose quantised weights are expanded.
      tokenizer: a tokenizer.json or its folder instead of the checkpoint's own.
      dtype: dtype of parameters and activations; vectors stay float32. "keep": bfloat16
        where all matrices on disk are, the integers of a GGUF file, else float32;
        "float64": of activations only.
      mesh: devices that hold the parameters; None: one device.
      ignored_keys: keys of config.json that do not change the model, as the caller
        knows.
      report: called with messages for the user: keys that were read over, a
        head that is not tied, weights that are not finite.

    Raises:
      UserError: it is no such checkpoint, or something in it is not understood; the
        first few differences are named.
    """
    path = Path(path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        # Imported here: the package of the extra is needed for such files only.
        from recurjax.convert.formats.gguf_file import open_gguf  # the extra `gguf`

        keys, source, text, beside = open_gguf(path, with_tokenizer=tokenizer is None)
        hf = model_from_keys(keys, where=str(path), ignored=ignored_keys)
    else:
        # A directory's config.json and weights are read apart; a GGUF file has both.
        hf, source = _open(path, ignored_keys)
        text, beside = None, read_text_settings(path)
        if tokenizer is None and (path / "tokenizer.json").is_file():
            tokenizer = path
    if tokenizer is not None:
        text = load_tokenizer(tokenizer)
        if isinstance(text, JsonTokenizer):
            # A tokenizer from elsewhere may come without what belongs to the model.
            text.settings = text.settings.filled(beside)
    if hf.read_over:
        report(
            f"{path}: ignored, because they do not change the model: "
            f"{', '.join(hf.read_over)}"
        )
    if hf.text_of is not None:
        report(
            f"{path}: {hf.text_of} is imported without its image encoder, as a "
            "text model"
        )
    if hf.config.tied_head and _has_own_head(hf.architecture, source):
        # transformers follows the flag and would drop the head that was trained.
        report(
            f"{path}: tie_word_embeddings is true, but the head differs from the "
            "embedding: the head is used, and the model is not tied"
        )
        untied = dataclasses.replace(hf.config, tied_head=False)
        hf = hf._replace(config=untied)
    # The tokenizer decides what is vocabulary; rows beyond it stay and are never
    # predicted.
    config = _with_vocabulary(hf.config, text, path)
    config = _with_dtype(config, dtype, source, hf.architecture)
    # Of integers the pieces are those of the weights that they stand for.
    dense = dataclasses.replace(config, weight_dtype="float32")
    # What a large tokenizer took to read is not held while the weights are.
    host.give_back_freed_memory()
    model = load_model(
        config,
        hf_pieces(hf.architecture, dense),
        source,
        mesh=mesh,
        ignored=ignored_tensors(hf.architecture, dense),
        report=report,
    )
    return Imported(model, text, hf.architecture, hf.length)


def _open(
    directory: Path, ignored_keys: Collection[str]
) -> tuple[HfModel, TensorSource]:
    if not directory.exists():
        raise UserError(f"there is no checkpoint at {directory}: check the path")
    if not directory.is_dir():
        raise UserError(
            f"{directory} is not a checkpoint directory: name the folder that holds "
            "config.json, or a .gguf file"
        )
    values = read_keys(directory / "config.json")
    where = str(directory / "config.json")
    hf = model_from_keys(values, where=where, ignored=ignored_keys)
    source = with_usual_names(open_directory(directory), hf.architecture)
    return hf, source


def _has_own_head(architecture: str, source: TensorSource) -> bool:
    """Whether a checkpoint holds a head that is not its embedding."""
    embedding, head = tied_tensors(FAMILIES[architecture])
    if head not in source.tensors or embedding not in source.tensors:
        return False
    return not np.array_equal(source.read(head), source.read(embedding))


def _with_dtype(
    config: ModelConfig, dtype: str, source: TensorSource, architecture: str
) -> ModelConfig:
    if dtype == "float64":
        return dataclasses.replace(config, dtype=dtype)
    weights = dtype
    if dtype == "keep" and isinstance(source, QuantizedSource):
        weights = source.weight_dtype(tied_tensors(FAMILIES[architecture]))
    elif dtype == "keep":
        # float16 reaches further down than bfloat16, and not as far up.
        matrices = (info for info in source.tensors.values() if len(info.shape) > 1)
        narrow = all(info.dtype == "BF16" for info in matrices)
        weights = "bfloat16" if narrow else "float32"
    dtype = "bfloat16" if weights == "bfloat16" else "float32"
    return dataclasses.replace(config, dtype=dtype, weight_dtype=weights)


def _with_vocabulary(
    config: ModelConfig, tokenizer: Tokenizer | None, path: Path
) -> ModelConfig:
    rows = config.vocabulary
    if tokenizer is None or tokenizer.vocabulary == rows:
        return config
    # A token without a row of the table could not be read.
    if tokenizer.vocabulary > rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary} tokens and the model in "
            f"{path} only {rows}: name the model's own with --tokenizer"
        )
    return dataclasses.replace(
        config, vocabulary=tokenizer.vocabulary, pad_vocabulary_to=rows
    )
