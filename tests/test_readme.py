import re
from pathlib import Path

import pytest
from rich.console import Console

from recurjax.training.loop import train
from tests.tolerances import assert_values_close
from tests.training.compilation import quick_compilation
from tests.training.tiny_experiment import changed, config

__all__ = ["quick_compilation"]

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RECURRENT = ROOT / "recurjax" / "variants" / "recurrent_transformer" / "README.md"


@pytest.mark.usefixtures("quick_compilation")
def test_the_python_example_runs_and_says_the_truth(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiment = changed(config(), training={"steps": 2})
    train(experiment, Path("runs/quickstart"), console=Console(quiet=True))
    names = run_example(README)
    assert capsys.readouterr().out
    assert_values_close(names["tail"], names["logits"][:, 10:])


@pytest.mark.usefixtures("quick_compilation")
def test_the_recurrent_transformers_example_runs_and_says_the_truth():
    names = run_example(RECURRENT)
    assert_values_close(names["tail"], names["logits"][:, 12:])


def run_example(file: Path) -> dict:
    (example,) = re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL)
    names = {}
    exec(compile(example, str(file), "exec"), names)
    return names
