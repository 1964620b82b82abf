"""The small sets of recursive models, as small as they go."""

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import get_args

import pytest

from recurjax.errors import UserError
from recurjax.model import count_parameters

FOLDER = Path(__file__).parents[2] / "experiments" / "relaxed_recursive_transformer"
SCRIPTS = (
    *("runs", "uptraining_set", "byte_model", "smollm2", "loop_over_rat"),
    "more_loops",
)


@pytest.fixture
def script(quick_compilation, monkeypatch):
    """Imports a script as Python would run it, with its neighbours."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    known = set(sys.modules)
    yield importlib.import_module
    for name in SCRIPTS:
        if name not in known:
            sys.modules.pop(name, None)


def test_the_sets_have_every_case_that_the_issue_names(script):
    names = [case.name for case in script("byte_model").CASES]
    assert names == [
        *("base_on", "random", "reduced", "random_block"),
        *("average", "lower", "stepwise", "average_tied", "stepwise_tied"),
        *("stepwise_alone", "stepwise_exits"),
        *("rank32_zero", "rank8_svd", "rank32_svd", "rank128_svd"),
    ]
    smollm2 = script("smollm2")
    options = smollm2.Options(base=Path("base"), text=Path("text"))
    cases = {case.name: case for case in smollm2.cases(options)}
    starts = ("random", "reduced", "random_block", "lower", "average", "stepwise")
    inits = {f"b{b}_{init}" for b in (2, 3) for init in starts}
    ranks = {f"b2_rank{r}_{how}" for r in (64, 256) for how in ("zero", "svd")}
    assert set(cases) == inits | ranks | {"b2_stepwise_tied"} and len(cases) == 17
    assert cases["b2_rank64_zero"].convert == (
        *("--loops", "2", "--init", "average", "--no-tie-norms"),
        *("--rank", "64", "--adapters", "zero"),
    )


def test_a_table_has_means_and_spreads(script):
    matches = {"a": [{"x": 1.0, "y": 2.0}, {"x": 2.0}], "b": [{"x": 3.0}]}
    assert script("uptraining_set").table_of(matches).splitlines()[2:] == [
        "| a | 1.500 (1.000) | 2.000 |",
        "| b | 3.000 |  |",
    ]


def test_a_part_of_the_grid_is_chosen_by_name(script):
    select, cases = script("uptraining_set").select, script("byte_model").CASES
    assert select(cases, ()) == list(cases)
    names = ["rank8_svd", "base_on"]
    assert [case.name for case in select(cases, names)] == names
    with pytest.raises(UserError, match="--cases must be among base_on, "):
        select(cases, ["rank9"])


def test_a_looped_rat_has_the_parameters_of_one_and_the_flops_of_another(script):
    module = script("loop_over_rat")
    options = module.Options(text=Path("text"))
    runs = {name: module.experiment(name, options) for name in get_args(module.Name)}
    sizes = {name: count_parameters(run.model).total for name, run in runs.items()}
    flops = {name: run.flops_per_token for name, run in runs.items()}
    assert sizes["looped"] == sizes["rat_4"] < sizes["looped_rank16"] < sizes["rat_8"]
    assert flops["rat_4"] < flops["looped"] == flops["rat_8"] < flops["looped_rank16"]


class FakeTimer:
    """A timer that goes off when a test says so."""

    def __init__(self, seconds, function, arguments):
        self.seconds, self.go_off = seconds, lambda: function(*arguments)
        self.state = "new"

    def start(self):
        self.state = "running"

    def cancel(self):
        self.state = "cancelled"


def test_after_its_minutes_a_set_is_told_to_stop(script, monkeypatch):
    module, timers, signals = script("uptraining_set"), [], []

    def timer(*words):
        timers.append(FakeTimer(*words))
        return timers[-1]

    monkeypatch.setattr(module, "Timer", timer)
    monkeypatch.setattr(module.os, "kill", lambda *words: signals.append(words))
    with module.stopped_after(2.5):
        assert timers[0].seconds == 150 and timers[0].state == "running"
        assert timers[0].daemon and signals == []
        timers[0].go_off()
        assert signals == [(os.getpid(), signal.SIGTERM)]
    assert timers[0].state == "cancelled"  # a set that ends sooner gets no signal
    with module.stopped_after(None):
        assert len(timers) == 1
    with pytest.raises(UserError, match="--minutes must be above 0, got 0"):
        module.stopped_after(0).__enter__()


@pytest.mark.sweep
def test_a_set_trains_converts_and_goes_on(script, tmp_path, capsys, monkeypatch):
    byte_model = script("byte_model")
    wanted = ("base_on", "reduced", "stepwise_exits", "rank8_svd")
    cases = tuple(case for case in byte_model.CASES if case.name in wanted)
    monkeypatch.setattr(byte_model, "CASES", cases)
    text, runs = tmp_path / "text.txt", tmp_path / "runs"
    text.write_text("It was a bright cold day in April. " * 300)
    words = ["--text", str(text), "--runs", str(runs), "--layers", "4"]
    words += ["--width", "16", "--steps", "10", "--batch", "8", "--length", "16"]
    assert byte_model.main([*words, "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    table = (runs / "results.md").read_text()
    assert said.endswith(table) and [
        line.split("|")[1].strip() for line in table.splitlines()[2:]
    ] == list(wanted)
    result = json.loads((runs / "results.json").read_text())
    assert [len(result[name]) for name in wanted] == [2, 2, 2, 2]
    assert set(result["base_on"][0]) == {"128 tokens"}
    scored = json.loads((runs / "stepwise_exits" / "exits.json").read_text())
    assert {item["rule"] for item in scored["exits"]} >= {
        "static",
        "confidence",
        "head",
    }
    assert (runs / "stepwise_exits" / "exits.png").is_file()
    for name in ("rank8_svd", "reduced"):
        frozen = json.loads((runs / name / "frozen.json").read_text())
        assert frozen["run"] == str(runs / "base")
    reduced = json.loads((runs / "reduced" / "config.json").read_text())
    assert reduced["training"]["start_from"] is None
    assert reduced["model"]["stack"]["layers"] == 2
    # Nothing is trained twice: the rows, and the speeds in them, stay.
    before = {path: path.read_bytes() for path in runs.rglob("metrics.jsonl")}
    assert byte_model.main([*words, "--seeds", "2"]) == 0
    after = {path: path.read_bytes() for path in runs.rglob("metrics.jsonl")}
    assert before == after
    assert len(after) == 9
    assert capsys.readouterr().out == table

    # The other set starts from any run: here the byte model.
    smollm2 = script("smollm2")
    monkeypatch.setattr(smollm2, "BATCH", 8)  # one row for each of the test's devices
    words = ["--base", str(runs / "base"), "--text", str(text)]
    words += ["--runs", str(tmp_path / "others"), "--loops", "2", "--inits", "lower"]
    words += ["--ranks", "2", "--tokens", "256", "--length", "32", "--seeds", "1"]
    words += ["--cases", "b2_random", "b2_stepwise_tied", "b2_rank2_svd"]
    assert smollm2.main(words) == 0
    said = capsys.readouterr().out.splitlines()
    rows = [line for line in said if line.startswith("|")]  # conversions speak too
    assert rows[0].startswith("| held-out nats per token | start | 256 tokens |")
    names = [row.split("|")[1].strip() for row in rows[2:]]
    assert names == ["b2_random", "b2_stepwise_tied", "b2_rank2_svd"]


@pytest.mark.sweep
def test_a_small_set_of_looped_rats_trains_and_resumes(script, tmp_path, capsys):
    module, text = script("loop_over_rat"), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 3000)
    words = [str(text), "--runs", str(tmp_path / "runs"), "--tokens", "8192"]
    words += ["--models", "looped", "looped_rank16", "--seeds", "1"]
    assert module.main(words) == 0
    table = capsys.readouterr().out
    assert "| looped |" in table and "| looped_rank16 |" in table
    assert module.main(words) == 0
    assert (tmp_path / "runs" / "results.md").read_text() in capsys.readouterr().out


def test_what_is_read_with_more_loops_is_twice_as_long(script):
    more_loops = script("more_loops")
    hop = more_loops.TASKS["hash_hop"]
    tested = more_loops.doubled(hop)
    assert (tested.hops, tested.pairs) == (2 * hop.hops, 2 * hop.pairs) == (4, 8)
    s3 = more_loops.TASKS["s3"]
    assert more_loops.doubled(s3).longest("validation") == 2 * s3.longest("train")


@pytest.mark.sweep
def test_a_text_is_read_with_every_number_of_loops(script, tmp_path, capsys):
    words = ["--runs", str(tmp_path), "--tasks", "text", "--steps", "2"]
    words += ["--seeds", "1", "--loops", "2", "8", "--width", "16"]
    assert script("more_loops").main(words) == 0
    table = capsys.readouterr().out
    assert table == (tmp_path / "text.md").read_text()
    assert table.startswith("| bits per byte by loops | 2 | 8 |")
    plain, random = table.splitlines()[2:]
    assert plain.startswith("| plain | ") and random.startswith("| random | ")
