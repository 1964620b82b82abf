import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from recurjax.errors import UserError
from recurjax.model import count_parameters
from recurjax.run_table import load_experiment
from recurjax.training.loop import train
from tests.training.tiny_experiment import changed

FOLDER = Path(__file__).parents[2] / "experiments" / "recurrent_transformer"
TRIAL = ["--steps", "3", "--rates", "0.01", "--seeds", "1", "--evaluation-batches", "1"]


@pytest.fixture
def script(quick_compilation, monkeypatch):
    """The script as a module: its neighbours are imported by their own names."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    import shakespeare_pair

    return shakespeare_pair


def test_the_pair_differs_in_the_stack_only_and_not_in_its_size(script):
    one, other = script.pair(script.Options()).values()
    assert count_parameters(one.model) == count_parameters(other.model)
    assert type(one.model.stack) is not type(other.model.stack)
    assert changed(one, model={"stack": other.model.stack}).model == other.model
    for part in ("data", "training", "optimizer", "schedule", "evaluation"):
        assert getattr(one, part) == getattr(other, part)


def test_runs_that_are_done_are_read_and_make_the_table(script, tmp_path, capsys):
    options = script.Options(rates=(1e-2, 1e-3), seeds=2)
    runs = [
        script.PairRun(
            model=model,
            rate=rate,
            seed=seed,
            bits_per_byte=bits + seed / 4,
            seconds=1.0,
        )
        for model, bits in (("transformer", 3.0), ("recurrent", 2.5))
        for rate in options.rates
        for seed in range(2)
    ]
    script.write_results(tmp_path / "results.json", script.pair(options), runs)
    words = ["--rates", "1e-2", "1e-3", "--seeds", "2", "--directory", str(tmp_path)]
    assert script.main(words) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() == printed
    *_, baseline, recurrent = printed.splitlines()
    assert "3.125 (0.250) | 3.125 (0.250) | 0.01: 3.000, 3.250" in baseline
    assert "2.625 (0.250) | 2.625 (0.250) | 0.01: 2.500, 2.750" in recurrent
    assert "| 115,264 | 0.644 | 1 |" in baseline


def test_one_model_alone_is_trained_where_it_is_named(script, tmp_path, capsys):
    options = script.Options(models=("transformer",), rates=(1e-2,), seeds=1, steps=9)
    run = script.PairRun(
        model="transformer", rate=1e-2, seed=0, bits_per_byte=3.0, seconds=1.0
    )
    script.write_results(tmp_path / "results.json", script.pair(options), [run])
    words = ["--models", "transformer", "--rates", "1e-2", "--seeds", "1"]
    assert script.main([*words, "--steps", "9", "--directory", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 3
    assert rows[2].startswith("| Transformer |")


def test_results_of_other_settings_are_refused(script, tmp_path):
    file = tmp_path / "results.json"
    script.write_results(file, script.pair(script.Options(steps=7)), [])
    with pytest.raises(UserError, match="other settings"):
        script.main(["--steps", "8", "--directory", str(tmp_path)])


@pytest.mark.sweep
def test_the_script_trains_as_the_trainer_does_and_goes_on(script, tmp_path, capsys):
    words = [*TRIAL, "--directory", str(tmp_path)]
    assert script.main(words) == 0
    first = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in first[:2]] == ["transformer", "recurrent"]
    assert script.main(words) == 0
    assert capsys.readouterr().out.splitlines() == first[2:]

    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    scores = {run["model"]: run["bits_per_byte"] for run in runs}
    for model in scores:
        experiment = changed(
            load_experiment(f"{FOLDER}/runs.py:shakespeare_{model}"),
            training={"steps": 3},
            schedule={"warmup_steps": 0},
            optimizer={"learning_rate": 0.01},
            evaluation={"batches": 1},
        )
        result = train(experiment, tmp_path / model, console=Console(quiet=True))
        assert result.score is not None
        assert scores[model] == pytest.approx(result.score.bits_per_byte, rel=1e-4)


def test_the_inits_compared_differ_in_the_init_only(monkeypatch):
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    import output_init

    one, one_deep, other, other_deep = output_init.rows(steps=None)
    for same, depth in ((one, one_deep), (other, other_deep)):
        assert same.model.stack.init.output == "same"
        assert depth.model.stack.init.output == "depth"
        init = depth.model.stack.init
        stack = replace(same.model.stack, init=init)
        model = replace(same.model, stack=stack)
        assert replace(same, name=depth.name, model=model) == depth
    with pytest.raises(UserError, match="--seeds must be at least 1"):
        output_init.main(["--seeds", "0"])
