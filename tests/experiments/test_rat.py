import re
from pathlib import Path

import pytest

from recurjax.data.config import PromptAnswer
from recurjax.model import count_parameters
from recurjax.run_table import load_experiment, load_runs
from recurjax.variants.rat import presets

TABLE = Path(__file__).parents[2] / "experiments" / "rat" / "runs.py"
LARGE = {
    "rnn": 1273.6,
    "attention": 1273.6,
    "attention_swa": 1273.6,
    "attention_swa_nope": 1273.6,
    "rat16": 1298.8,
    "rat64": 1298.8,
    "rat16_swa": 1286.2,
    "rat16_swa_nope": 1286.2,
}
"""Millions of parameters as the paper's code has them, by the text after the T."""
SMALL = 202.4, 205.6
"""Of the 200M runs: attention and RNN; RAT and what is made its size."""

RUNS = [
    name for name in load_runs(TABLE) if not name.startswith(("shakespeare_", "sft_"))
]


def split(name: str) -> tuple[str, int, str]:
    family, length, what = name.split("_", 2)
    return family, 1024 * int(length.removesuffix("k")), what


def test_every_model_of_the_paper_is_here():
    runs = {split(name) for name in RUNS}
    small = {"attention", "rnn", "rat64", "rat128", "rat256"}
    small |= {f"reversed_{chunks}_chunks" for chunks in (16, 64, 128)}
    for length in (8192, 16384, 32768):
        assert small <= {what for f, t, what in runs if (f, t) == ("pg19", length)}
    ablations = {"rat64_token_rope", "rat64_low_rank_gates"}
    assert {("pg19", 8192, what) for what in ablations} <= runs
    assert {what for f, t, what in runs if (f, t) == ("fineweb", 4096)} == set(LARGE)
    long = {"rnn", "rat16", "attention", "attention_swa", "rat16_swa"}
    assert {what for f, t, what in runs if (f, t) == ("fineweb", 16384)} == long


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_papers_settings(name):
    family, length, what = split(name)
    run = load_experiment(f"{TABLE}:{name}")
    training, optimizer, small = run.training, run.optimizer, family == "pg19"
    assert run.name == f"rat_{name}" and training.length == length
    assert training.tokens_per_step == 2**20 * (1 if small else 2)
    tokens = training.steps * training.tokens_per_step
    assert tokens == pytest.approx(15e9 if small else 100e9, rel=1e-4)
    assert optimizer.learning_rate == (6e-4 if small else 8e-4)
    assert (optimizer.b1, optimizer.b2) == (0.9, 0.98 if small else 0.95)
    assert (optimizer.weight_decay, optimizer.decay) == (0.1, "all")
    assert training.gradient_clip == 1.0
    warmup = run.schedule.warmup_steps / training.steps
    assert warmup == pytest.approx(0.1 if small else 0.05, abs=1e-4)
    assert run.schedule.end * optimizer.learning_rate == pytest.approx(1e-6)
    stack = run.model.stack
    size = (12, 1024, 64) if small else (24, 2048, 128)
    assert (stack.layers, stack.width, stack.pattern[0].head_width) == size
    assert run.model.vocabulary == (50257 if small else 32000)
    assert len(stack.pattern) == (2 if "swa" in what else 1)
    if "swa" in what:
        assert stack.pattern[1].window == 1024
    if what == "rnn":
        assert stack.pattern[0].gate_horizon == length
    if what.startswith("reversed"):
        assert length // stack.pattern[0].chunk == int(what.split("_")[1])
    if what.startswith("rat") and what[3:].split("_")[0].isdecimal():
        assert stack.pattern[0].chunk == int(what[3:].split("_")[0])
    for mixer in stack.pattern:
        position = getattr(mixer, "attention", mixer)
        position = getattr(position, "position", None)
        rotated = what != "rnn" and not (
            "nope" in what and mixer is not stack.pattern[-1]
        )
        assert (position is not None) == rotated
        if position is not None:
            long = not small and length > 4096
            assert position.base == (500_000.0 if long else 10_000.0)


@pytest.mark.parametrize("what", LARGE)
def test_a_large_run_has_the_papers_size(what):
    run = load_experiment(f"{TABLE}:fineweb_4k_{what}")
    assert round(count_parameters(run.model).total / 1e6, 1) == LARGE[what]


@pytest.mark.parametrize(
    "what",
    [
        "attention",
        "rnn",
        "rat64",
        "rat256",
        "reversed_64_chunks",
        "rat64_token_rope",
        "rat64_low_rank_gates",
    ],
)
def test_a_small_run_is_as_large_as_those_that_it_is_compared_with(what):
    run = load_experiment(f"{TABLE}:pg19_8k_{what}")
    padding = (run.model.padded_vocabulary - run.model.vocabulary) * 1024
    count = count_parameters(run.model).total - padding
    wanted = SMALL[what not in ("attention", "rnn")]
    assert count / 1e6 == pytest.approx(wanted, abs=0.1)


def test_the_ablations_differ_from_rat64_as_they_say():
    runs = [
        load_experiment(f"{TABLE}:pg19_8k_rat64{tail}").model.stack.pattern[0]
        for tail in ("", "_token_rope", "_low_rank_gates")
    ]
    assert [run.position_of for run in runs] == ["chunk", "token", "chunk"]
    assert [run.groups for run in runs] == [2, 2, 16]
    rank = presets.balanced_rank(1024, 16, 2)
    assert [run.forget_rank for run in runs] == [None, None, rank]
    assert [run.output_rank for run in runs] == [None, None, rank]


def test_fine_tuning_goes_on_with_the_papers_models_on_answers():
    names = [name for name in load_runs(TABLE) if name.startswith("sft_")]
    assert len(names) == 4 * 5 + 2 * 5
    for name in names:
        run = load_experiment(f"{TABLE}:{name}")
        length = "16k" if "16k" in name else "4k"
        model = re.split("(?:summary|full|passage|qmsum|wikisum)_", name)[1]
        before = load_experiment(f"{TABLE}:fineweb_{length}_{model}")
        assert run.model == before.model
        assert run.training.length == {"4k": 4096, "16k": 16384}[length]
        assert run.training.start_from == f"runs/{before.name}"
        assert run.training.batch == (32 if "qmsum" in name else 128)
        rate = run.optimizer.learning_rate
        assert (rate, run.optimizer.weight_decay) == (1e-5, 0.01)
        assert isinstance(run.data.corpus, PromptAnswer)
        assert run.schedule.end * rate == pytest.approx(1e-6)
