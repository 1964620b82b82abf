"""RecurFormer's runs have the paper's sizes; its scripts, as small as they go."""

import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.tasks import HashHop, Mqar
from recurjax.data.tasks.mqar import FIGURE_2_TEST, FIGURE_2_TRAIN
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.experiment import write_experiment
from recurjax.model import count_parameters
from recurjax.plan.topology import parse_topology
from recurjax.run_table import load_experiment, load_runs
from recurjax.surgery.recency import HeadRecency
from recurjax.training.spikes import Diverged
from tests.variants.transformer import switches as transformer

FOLDER = Path(__file__).parents[2] / "experiments" / "recurformer"
TABLE = FOLDER / "runs.py"
SCRIPTS = (
    *("runs", "cache_table"),
    *("mqar", "hash_hop", "hash_hop_text", "smollm2"),
    *("longest_prompt", "head_figures"),
)
RUNS = load_runs(TABLE)
SIZES = {"llama2_7b": 6738415616, "qwen2_0_5b": 494032768, "qwen2_7b": 7615616512}
"""Parameters of the models themselves."""
SMALLEST = {"smollm2_135m": 134515008}


def heads(experiment) -> float:
    stack = experiment.model.stack
    if not hasattr(stack, "replaced"):
        return 0.0
    count = stack.layers * stack.transformer.attention.heads
    return sum(map(len, stack.replaced)) / count


@pytest.mark.parametrize("model", SIZES | SMALLEST)
def test_the_bases_are_the_models_themselves(model):
    corpus = "english" if model in SMALLEST else "hash_hop"
    run = load_experiment(f"{TABLE}:{model}_{corpus}_beta_00")
    assert count_parameters(run.model).total == (SIZES | SMALLEST)[model]
    assert run.training.start_from == f"runs/{model}"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_its_share_of_heads(name):
    if name == "small_hash_hop":
        pytest.skip("a base: nothing is replaced yet")
    run, beta = load_experiment(f"{TABLE}:{name}"), int(name.rpartition("_")[2]) / 100
    assert heads(run) == pytest.approx(beta, abs=2e-3)
    if beta and not name.startswith(("mqar", "small")):
        assert run.model.stack.mamba.dt_rank == 256
        assert run.training.start_from.endswith(name.partition("_beta")[2])


def test_the_papers_tables_are_here():
    betas = {"00", "25", "50", "75", "90", "100"}
    for model in SIZES:
        hop = f"{model}_hash_hop_beta_"
        assert {n.removeprefix(hop) for n in RUNS if n.startswith(hop)} == betas
        text = f"{model}_wikipedia_beta_"
        assert {n.removeprefix(text) for n in RUNS if n.startswith(text)} == {
            "00",
            "50",
        }
    task = load_experiment(f"{TABLE}:mqar_beta_50").data.task
    assert task == Mqar(train=FIGURE_2_TRAIN, validation=FIGURE_2_TEST)


def test_a_converted_directory_gives_a_row_its_heads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "qwen2_0_5b_wikipedia_beta_50"
    run = load_experiment(f"{TABLE}:{name}")
    stack = run.model.stack
    turned = replace(stack, replaced=stack.replaced[::-1])
    start = Path(run.training.start_from)
    start.mkdir(parents=True)
    model = replace(run.model, stack=turned, dtype="float32")
    write_experiment(replace(run, model=model), start / "config.json")
    again = load_experiment(f"{TABLE}:{name}").model
    assert again == replace(run.model, stack=turned)


@pytest.fixture
def script(quick_compilation, monkeypatch):
    """Imports a script as Python would run it, with its neighbours."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    known = set(sys.modules)
    yield importlib.import_module
    for name in SCRIPTS:
        if name not in known:
            sys.modules.pop(name, None)


def test_heads_are_chosen_by_recency_by_chance_and_against_it(script):
    hash_hop = script("hash_hop")
    count = np.array([[4, 3], [0, 1]])
    unread = np.zeros((2, 2)), np.zeros((2, 2, 2, 2))
    recency = HeadRecency(count / 4, count, *unread, 4, 1)
    assert hash_hop.chosen(recency, "recent", 0.5, seed=0) == ((0, 1), ())
    assert hash_hop.chosen(recency, "least", 0.5, seed=0) == ((), (0, 1))
    assert hash_hop.chosen(recency, "groups", 0.5, seed=0) == ((0, 1), ())
    drawn = {hash_hop.chosen(recency, "random", 0.5, seed=seed) for seed in range(9)}
    assert len(drawn) > 1
    with pytest.raises(UserError, match="--choices must be among recent.* got best"):
        hash_hop.main(["--choices", "best"])
    with pytest.raises(
        UserError, match=r"--further must be a share in \(0, 1\], got 0\.0"
    ):
        hash_hop.main(["--further", "0"])


def test_the_cache_table_has_the_papers_llama_and_keeps_the_bound(script):
    cache_table = script("cache_table")
    for beta, *paper in zip(
        (0.25, 0.5, 0.75, 0.9, 1.0), *cache_table.PAPER["llama2_7b"], strict=True
    ):
        for whole_groups in (True, False):
            result, _ = cache_table.shares("llama2_7b", beta, whole_groups=whole_groups)
            np.testing.assert_allclose(result, paper, rtol=0, atol=6e-4)
        for model in ("qwen2_0_5b", "qwen2_7b"):
            whole, _ = cache_table.shares(model, beta, whole_groups=True)
            spread, _ = cache_table.shares(model, beta, whole_groups=False)
            assert 1 - beta - 0.01 <= whole[1] <= spread[1]


def test_problems_are_written_as_text(script, tmp_path):
    out = tmp_path / "rows.jsonl"
    words = ["--out", str(out), "--rows", "3", "--length", "600", "--hops", "4"]
    assert script("hash_hop_text").main(words) == 0
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    task = HashHop(length=600, hops=4)
    assert len(texts) == 3 == len(set(texts))
    assert all(len(text) == task.length_of(task.pairs) for text in texts)
    assert all(text.count(">") == 1 and text.endswith("\n") for text in texts)


def test_controls_are_the_least_recent_heads_and_heads_by_lot(script, tmp_path):
    smollm2 = script("smollm2")
    options = smollm2.Options(base=Path("base"), text=Path("text"), runs=tmp_path)
    with pytest.raises(UserError, match="--scopes least: put heads before it"):
        smollm2.control_heads(options, 0.5, "least")
    measured = {"ra_i": [[3, 1], [0, 1]], "recency_ratio": [[0.9, 0.4], [0.1, 0.3]]}
    (tmp_path / "start_heads_0.25_plain").mkdir()
    (tmp_path / "start_heads_0.25_plain" / "heads.json").write_text(
        json.dumps(measured)
    )
    assert smollm2.control_heads(options, 0.5, "least") == [[], [0, 1]]
    drawn = {
        str(smollm2.control_heads(options, 0.5, f"random{seed}")) for seed in range(9)
    }
    assert len(drawn) > 1


def test_mqar_without_a_convolution_is_another_run(script):
    mqar = script("mqar")
    run = mqar.small("50", 1, steps=None, conv=1)
    assert (run.name, run.model.stack.mamba.conv) == ("beta_50_conv1_seed1", 1)
    assert mqar.small("50", 1, steps=None).model.stack.mamba.conv == 4
    assert mqar.small("00", 0, steps=None, conv=1).name == "beta_00_seed0"


@pytest.mark.slow
def test_heads_of_a_run_are_drawn(script, tmp_path, capsys):
    config = transformer.small(key_heads=2)
    config = replace(config, vocabulary=257)
    experiment = new_experiment(tmp_path / "run", config, length=16)
    write_run(tmp_path / "run", transformer.build(config), experiment, ByteTokenizer())
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 9)
    words = [str(tmp_path / "run"), "--text", str(tmp_path / "text.txt")]
    words += ["--samples", "4", "--length", "40", "--out", str(tmp_path / "out")]
    assert script("head_figures").main(words) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| first", "| others"]
    for name in ("figure5.png", "figure8.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="--layer 99 --head 0: the model has layers"):
        script("head_figures").main([*words, "--layer", "99"])


@pytest.mark.sweep
def test_the_mqar_set_trains_and_prints_its_table(script, tmp_path, capsys):
    mqar = script("mqar")
    words = ["--runs", str(tmp_path), "--steps", "2", "--seeds", "1"]
    assert mqar.main([*words, "--betas", "50"]) == 0
    said = capsys.readouterr().out
    head, _, floor, row = said.splitlines()
    assert head.endswith("| 64; 8 | 64; 16 | 128; 32 | 256; 64 | 512; 128 |")
    assert floor.startswith("| floor | 0.250 | 0.125 |")
    assert row.startswith("| beta 0.5 | 0.")


@pytest.mark.sweep
def test_the_hash_hop_set_replaces_heads_trains_on_and_prints_its_table(
    script, tmp_path, monkeypatch, capsys
):
    hash_hop = script("hash_hop")
    run = hash_hop.load_experiment(f"{TABLE}:small_hash_hop")
    task = replace(run.data.task, validation_rows=40)
    stack = run.model.stack
    heads = replace(stack.attention, heads=4, key_heads=2, head_width=8)
    mlp = replace(stack.mlp, width=32)
    stack = replace(stack, layers=2, width=32, attention=heads, mlp=mlp)
    run = replace(
        run,
        data=replace(run.data, task=task),
        model=replace(run.model, stack=stack),
    )
    monkeypatch.setattr(hash_hop, "load_experiment", lambda _: run)
    monkeypatch.setattr(hash_hop, "FIRST", ((1, 3, 1, 8),))
    monkeypatch.setattr(hash_hop, "TEXTS", 4)
    words = ["--runs", str(tmp_path), "--steps", "1", "--seeds", "1"]
    assert hash_hop.main([*words, "--betas", "1", "--choices", "recent", "least"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| h_gq at beta | 0 | 1.0 |"
    names = [row.split("|")[1].strip() for row in rows]
    assert names == ["floor", "base", "base, trained on", "recent", "least"]
    # Of all heads there is one choice: it is trained once.
    assert rows[3].split("|")[3] == rows[4].split("|")[3]
    assert len(list(tmp_path.glob("all_1.0_seed0*"))) == 2

    train, first = hash_hop.train, iter([True])

    def diverging(run, *arguments, **options):
        if run.name.startswith("all") and next(first, False):
            raise Diverged("too high a loss")
        return train(run, *arguments, **options)

    # `recent` diverges; `least`, the same heads, has the score of what is trained.
    monkeypatch.setattr(hash_hop, "train", diverging)
    assert hash_hop.main([*words, "--betas", "1", "--choices", "recent", "least"]) == 0
    *table, lost = capsys.readouterr().out.splitlines()
    assert table[-1].startswith("| least | ")
    assert lost == "recent at beta 1.0, seed 0, diverged and has no score."


@pytest.mark.parametrize("bend", [-0.1, 0.0, 0.3])
def test_the_longest_prompt_is_where_memory_ends(script, monkeypatch, bend):
    """The line through two lengths is no more than a first guess."""
    longest_prompt = script("longest_prompt")
    result = partial(planned, bend=bend)
    monkeypatch.setattr(longest_prompt, "make_plan", result)
    plan = longest_prompt.longest(RUNS["small_hash_hop"].make("x"), "h100")
    step, h100 = longest_prompt.STEP, parse_topology("h100")
    fitting = [n for n in range(1, 200) if result(None, h100, length=n * step).fits]
    assert plan.answer["tokens"] == max(fitting) * step
    assert 64 < max(fitting) < 150


def planned(experiment, device, *_, length, bend, rows=1):
    """Half a MiB a token after 12 GiB, more or less of it beyond 65,536."""
    needed = 12 * 2**30 + 2**19 * (length + bend * max(0, length - 2**16))
    fits = needed <= device.hardware.memory
    answer = {"tokens": length}
    return SimpleNamespace(needed=needed, fits=fits, answer=answer, reason="")
