"""Golden Hugging Face directories, and changed copies of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import models, pre_tokenizers

from tests.golden.cases import OWN, golden_cases

CASES = [
    pytest.param(file.values[0].parent, id=file.id)
    for file in golden_cases("hf/*/config.json")
]
LLAMA = OWN / "hf" / "llama"
"""Which tests change that need some directory, not a golden case."""


def arrays(directory: Path) -> dict[str, np.ndarray]:
    """Reads the case's inputs and outputs."""
    with np.load(directory / "io.npz") as file:
        return {name: file[name] for name in file.files}


def copy_of(directory: Path, to: Path, *, tokens: int | None = None, **keys: Any):
    """Copies config and weights; `keys` change the config, None removes one.

    Args:
      tokens: also write a tokenizer.json of that many words, w0, w1, ...
    """
    to.mkdir(parents=True)
    config = json.loads((directory / "config.json").read_text()) | keys
    config = {name: value for name, value in config.items() if value != "gone"}
    (to / "config.json").write_text(json.dumps(config))
    shutil.copy(directory / "model.safetensors", to)
    if tokens is not None:
        words = {f"w{i}": i for i in range(tokens)}
        tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(to / "tokenizer.json"))
        (to / "tokenizer_config.json").write_text('{"bos_token": "w1"}')
    return to


def rewrite(directory: Path, change) -> None:
    """Replaces the weights by what `change` makes of a dict of them."""
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file)
