"""The golden cases: every file of a format in the folder `$RECURJAX_GOLDEN`."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

OWN = Path(__file__).parent
"""The repository's cases: for tests that need some model of the authors', any one."""
GOLDEN = Path(os.environ.get("RECURJAX_GOLDEN", OWN))

LATENT = "latent_recurrent_transformer"
FORMATS = (
    "recurrent_transformer/rt_block_*.npz",
    "recurrent_transformer/rt_lm_*.npz",
    "recurrent_transformer/transformer_block_*.npz",
    "rat/rat_*.npz",
    "rat/rnn*.npz",
    "rat/attention*.npz",
    "rat/swa*.npz",
    "rat/lm_*.npz",
    f"{LATENT}/*_baseline_*.npz",
    f"{LATENT}/lrt_official_*.npz",
    f"{LATENT}/lrtref_*.npz",
    f"{LATENT}/optim_*.npz",
    f"{LATENT}/bpb_case*.npz",
    f"{LATENT}/core_eval_cases*.json",
    f"{LATENT}/dataloader_docs*.json",
    f"{LATENT}/tokenizer_case*.json",
    "recurformer/scan*.npz",
    "recurformer/mixer*.npz",
    "recurformer/block_*.npz",
    "recurformer/recency_ratio*.json",
    "relaxed_recursive_transformers/exits_*.npz",
    "relaxed_recursive_transformers/[!e]*.npz",
    "relaxed_recursive_transformers/indices*.json",
    "hf/*/config.json",
)
"""What the tests read, in the folders of variants that are built; a folder that is
not named here is left alone. `test_every_file_is_read.py` holds that all is read."""
FOLDERS = {one.split("/")[0] for one in FORMATS}
BESIDE = {
    f"{LATENT}/core_eval_stub_weights*.npz": f"{LATENT}/core_eval_cases*.json",
    f"{LATENT}/dataloader_bestfit*.npz": f"{LATENT}/dataloader_docs*.json",
    "hf/*/*": "hf/*/config.json",
}
"""Files that are read with a file of a format."""


def golden_cases(*formats: str) -> list[Any]:
    """Returns a test parameter for each file; its id is `folder/name`."""
    own = {pattern for pattern in formats if pattern.split("/")[0] in FOLDERS}
    assert own <= set(FORMATS), f"name them in FORMATS: {own - set(FORMATS)}"
    paths = sorted({path for pattern in formats for path in GOLDEN.glob(pattern)})
    return [pytest.param(path, id=case_id(path)) for path in paths]


def case_id(path: Path) -> str:
    """Names a case by its folder, and a Hugging Face model by its own."""
    model = path.name == "config.json"
    return "/".join(path.parts[-3:-1] if model else (path.parent.name, path.stem))


def own_case(one: str) -> Path:
    """Returns the repository's first file of a format, whatever folder is tested."""
    return sorted(OWN.glob(one))[0]


def load(path: Path) -> dict[str, np.ndarray]:
    """Reads a complete case."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def assert_known(switches: dict[str, Any], known: set[str] | frozenset[str]) -> None:
    """Fails for a switch that is on and that the reader of the case does not have."""
    on = {name for name, value in switches.items() if value not in (None, False)}
    assert on <= known, f"unknown switches: {sorted(on - known)}"


def largest_of_each(case: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the case with every number replaced by the largest of its own tensor.

    The formats' tolerances are shares of that. Read through the same layout as the
    case, it says for each part of ours, a layer or a head, which tensor it came from.
    """
    return {
        name: np.full_like(array, np.max(np.abs(array), initial=0.0))
        if np.issubdtype(array.dtype, np.floating)
        else array
        for name, array in case.items()
    }
