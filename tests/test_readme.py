"""The Recurrent Transformer's example; tests/documents runs the README's."""

import re
from pathlib import Path

import pytest

from tests.tolerances import assert_values_close
from tests.training.compilation import quick_compilation

__all__ = ["quick_compilation"]

ROOT = Path(__file__).parents[1]
RECURRENT = ROOT / "recurjax" / "variants" / "recurrent_transformer" / "README.md"


@pytest.mark.usefixtures("quick_compilation")
def test_the_recurrent_transformers_example_runs_and_says_the_truth():
    names = run_example(RECURRENT)
    assert_values_close(names["tail"], names["logits"][:, 12:])


def run_example(file: Path) -> dict:
    (example,) = re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL)
    names = {}
    exec(compile(example, str(file), "exec"), names)
    return names
