"""The golden cases: every file of a format in the folder `$RECURJAX_GOLDEN`."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(os.environ.get("RECURJAX_GOLDEN", Path(__file__).parent))


def golden_cases(*patterns: str) -> list[Any]:
    """Returns a test parameter for each file; its id is `folder/name`."""
    paths = sorted({path for pattern in patterns for path in GOLDEN.glob(pattern)})
    return [pytest.param(path, id=f"{path.parent.name}/{path.stem}") for path in paths]


def load(path: Path) -> dict[str, np.ndarray]:
    """Reads a whole case."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


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
