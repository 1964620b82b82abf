"""The small set of tasks: models of one size, its order, its table, one run of it."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from recurjax.errors import UserError
from recurjax.model import count_parameters
from recurjax.run_table import load_experiment, load_runs

FOLDER = Path(__file__).parents[2] / "experiments" / "tasks"
TABLE = FOLDER / "runs.py"


@pytest.fixture
def small(unoptimized, monkeypatch):
    """Imports the script as Python would run it."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    yield importlib.import_module("small")
    sys.modules.pop("small", None)


def test_the_models_of_a_task_are_of_one_size_and_see_the_same_rows(small):
    options = small.Options()
    assert list(load_runs(TABLE)) == [
        f"{task}_{model}" for task in options.tasks for model in options.models
    ]
    runs = [load_experiment(f"{TABLE}:mqar_{model}") for model in options.models]
    sizes = [count_parameters(run.model).total for run in runs]
    assert max(sizes) / min(sizes) < 1.005
    assert all(run.data == runs[0].data for run in runs)
    assert all(run.training == runs[0].training for run in runs)


def test_rates_are_tried_at_one_seed_and_the_best_one_is_kept(
    small, monkeypatch, tmp_path, capsys
):
    trained = []

    def train(run, root, *, console):
        trained.append(run.name)
        root.mkdir(parents=True)
        small.RunDirectory(root).claim(
            run, small.TaskDataset(config=run.data).tokenizer
        )
        # The best rate of copy is 0.01 and of recall 0.001; 0.003 is the first.
        rate, copy = run.optimizer.learning_rate, run.name.startswith("copy")
        share = 0.9 if rate == (0.01 if copy else 0.001) else 0.5
        row = {"step": 7, "kind": "validation", "accuracy": share, "loss": 1.0}
        row["sequence_accuracy"] = share / 2
        small.RunDirectory(root).metrics.write_text(json.dumps(row) + "\n")
        return SimpleNamespace(outcome="finished")

    monkeypatch.setattr(small, "train", train)
    words = ["--runs", str(tmp_path), "--tasks", "copy", "recall", "--models", "rnn"]
    words += ["--rates", "3e-3", "1e-3", "1e-2", "--seeds", "2", "--steps", "7"]
    assert small.main(words) == 0
    first = [
        f"{t}_rnn_{r}" for r in ("0.003", "0.001", "0.01") for t in ("copy", "recall")
    ]
    assert trained == [*first, "copy_rnn_0.01_seed1", "recall_rnn_0.001_seed1"]
    table = (tmp_path / "results.md").read_text()
    assert table == capsys.readouterr().out
    assert "| rnn | 0.900 (0.900, 0.900) | 0.900 (0.900, 0.900) |" in table
    assert "| rnn | 0.450 (0.450, 0.450) | 0.450 (0.450, 0.450) |" in table
    assert "| rnn | 0.01 | 0.001 |" in table
    # What is there is not trained again, unless it is another run.
    assert small.main(words) == 0 and len(trained) == 8
    with pytest.raises(FileExistsError):
        small.main([*words[:-1], "8"])


def test_rows_of_another_table_can_be_trained_in_smaller_batches(small):
    table = FOLDER.parent / "recurrent_transformer" / "runs.py"
    options = small.Options(table=table, steps=9, batch=4)
    run = small.experiment_of(
        options, small.Cell("mad_copy", "recurrent"), seed=1, rate=0.25
    )
    row = load_experiment(f"{table}:mad_copy_recurrent")
    assert run.model == row.model and run.name == "mad_copy_recurrent_0.25_seed1"
    assert (run.training.steps, run.training.batch) == (9, 4)
    assert run.optimizer.learning_rate == 0.25 and run.training.seed == 1


def test_a_table_is_whole_at_one_rate_before_another_is_tried(small):
    options = small.Options(tasks=("copy", "s3"), models=("rnn", "rt"), seeds=1)
    turns = [(*cell, rate) for cell, _, rate in small.in_turn(options, {})]
    assert turns[:4] == [
        ("copy", "rnn", 3e-3),
        ("copy", "rt", 3e-3),
        ("s3", "rnn", 3e-3),
        ("s3", "rt", 3e-3),
    ]
    assert len(turns) == 12
    # At equal accuracy the lower loss decides.
    runs = {
        (0, 0.1): small.Figures(accuracy=0.5, whole_rows=0.0, loss=2.0),
        (0, 0.2): small.Figures(accuracy=0.5, whole_rows=0.0, loss=1.0),
        (1, 0.3): small.Figures(accuracy=0.9, whole_rows=0.0, loss=0.1),
        (0, 0.4): small.Figures(accuracy=0.5, whole_rows=0.0, loss=math.inf),
    }
    assert small.best_rate(runs) == 0.2
    with pytest.raises(UserError, match="--rates must be positive numbers"):
        small.main(["--rates", "0"])


@pytest.mark.slow
def test_a_run_is_trained_and_read_further(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(small, "FURTHER", 2)
    words = ["--runs", str(tmp_path), "--tasks", "s3", "--models", "rnn"]
    words += ["--rates", "3e-3", "--seeds", "1", "--steps", "2"]
    assert small.main(words) == 0
    said = capsys.readouterr().out
    assert "| accuracy | s3 | s3 to 2 T |" in said
    row = said.splitlines()[2]
    shares = [float(cell) for cell in row.split("|")[2:4]]
    assert all(0.05 < share < 0.4 for share in shares)  # six answers, nothing learned
    log = (tmp_path / "s3_rnn_0.003" / "log").read_text()
    assert small.main(words) == 0  # nothing is trained or read again
    assert capsys.readouterr().out == said
    assert (tmp_path / "s3_rnn_0.003" / "log").read_text() == log
