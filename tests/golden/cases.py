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
