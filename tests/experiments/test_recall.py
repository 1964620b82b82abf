"""The grid of recall: models of one size, what is resumed, its table and pictures."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest

from recurjax.data.tasks import TaskData
from recurjax.errors import UserError
from recurjax.model import count_parameters
from recurjax.run_table import load_experiment, load_runs

FOLDER = Path(__file__).parents[2] / "experiments" / "tasks"
TABLE = FOLDER / "runs.py"


@pytest.fixture
def recall(quick_compilation, monkeypatch):
    """Imports the script as Python would run it."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    yield importlib.import_module("recall")
    sys.modules.pop("recall", None)


def test_the_models_of_a_task_are_of_one_size_and_see_the_same_rows(recall):
    runs = dict(recall.grid(recall.Options(tasks=("mqar",), seeds=1)))
    assert len(runs) == 18
    sizes = [count_parameters(run.model).total for run in runs.values()]
    assert max(sizes) / min(sizes) < 1.005
    first = next(iter(runs.values()))
    assert all(run.data == first.data for run in runs.values())
    assert all(run.training == first.training for run in runs.values())
    every = [name for name in load_runs(TABLE)]
    cells = [cell for cell, _ in recall.grid(recall.Options(seeds=1))]
    assert [f"{cell.task}_{cell.mixer}" for cell in cells] == every


def test_a_grid_is_cut_by_its_options(recall):
    options = recall.Options(
        tasks=("needles",),
        mixers=("rnn", "recurformer_25"),
        seeds=2,
        rates=(1e-3, 1e-2),
        tokens=1e5,
    )
    runs = recall.grid(options)
    assert [tuple(cell)[1:] for cell, _ in runs[:5]] == [
        ("rnn", 1e-3, 0),
        ("rnn", 1e-2, 0),
        ("recurformer_25", 1e-3, 0),
        ("recurformer_25", 1e-2, 0),
        ("rnn", 1e-3, 1),
    ]
    # 49 steps of 2,048 tokens, in portions of 25.
    assert {run.training.steps for _, run in runs} == {50}
    assert [run.optimizer.learning_rate for _, run in runs[:2]] == [1e-3, 1e-2]
    assert [run.training.seed for _, run in runs] == [0] * 4 + [1] * 4
    with pytest.raises(UserError, match="--seeds"):
        recall.Options(seeds=0)


@pytest.mark.slow
def test_runs_that_ended_are_read_and_a_cut_one_is_made_again(
    recall, monkeypatch, tmp_path, capsys
):
    made = []

    def lines_of(cell, run, *, every):
        made.append(cell)
        passes = cell.mixer == "attention" and cell.seed < 2
        line = recall.Line(
            **cell._asdict(),
            parameters=1,
            step=every,
            tokens=every * 2048,
            accuracy=0.3,
            rows_right=0.1,
            loss=1.0,
            seconds=1.0,
            end=None,
        )
        yield line
        later = {"step": 2 * every, "tokens": (1 + cell.seed) * 10**6}
        end = "passed" if passes else "budget"
        yield dataclasses.replace(
            line, accuracy=0.95 if passes else 0.26, end=end, **later
        )

    monkeypatch.setattr(recall, "lines_of", lines_of)
    words = ["--out", str(tmp_path), "--tasks", "mqar", "--tokens", "1e5"]
    words += ["--mixers", "attention", "rnn"]
    assert recall.main(words) == 0 and len(made) == 6
    table = capsys.readouterr().out
    assert table == (tmp_path / "results.md").read_text()
    assert "| M tokens to 0.9 | mqar (floor 0.250) |" in table
    assert "| attention | **1.50** (1.00, 2.00), 2 of 3 seeds |" in table
    assert "| rnn | no: 0.26, 0.26, 0.26 at 3.0 |" in table
    assert (tmp_path / "mqar.png").read_bytes().startswith(b"\x89PNG")
    # Nothing is made again, but a run that was cut and one with a larger budget.
    assert recall.main(words) == 0 and len(made) == 6
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    assert recall.main(words) == 0 and made[6:] == [("mqar", "rnn", 3e-3, 2)]
    assert [json.loads(x)["step"] for x in file.read_text().splitlines()[-2:]] == [
        *(25, 50)
    ]
    words[words.index("1e5")] = "1.5e6"
    assert recall.main(words) == 0
    assert [cell.seed for cell in made[7:]] == [0]
    # The table keeps what earlier calls made of other tasks.
    words[words.index("mqar")] = "needles"
    assert recall.main(words) == 0
    table = (tmp_path / "results.md").read_text()
    assert table.startswith("| M tokens to 0.9 | mqar (floor 0.250) | needles (floor ")


@pytest.mark.sweep
def test_attention_learns_needles_in_800_steps(recall):
    """A sweep: when a seed passes depends on how a processor rounds."""
    run = load_experiment(f"{TABLE}:needles_attention")
    run = dataclasses.replace(
        run, training=dataclasses.replace(run.training, steps=800)
    )
    cell = recall.Cell("needles", "attention", 3e-3, 0)
    lines = list(recall.lines_of(cell, run, every=100))
    assert isinstance(run.data, TaskData)
    floor = recall.floor_of(run.data.task)
    assert lines[0].accuracy < 1.5 * floor < 0.5
    assert lines[-1].end == "passed" and lines[-1].accuracy >= 0.9
