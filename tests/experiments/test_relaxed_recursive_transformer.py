"""The paper's runs are those of the paper."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from recurjax.experiment import write_experiment
from recurjax.losses.divergence import Divergence
from recurjax.run_table import load_experiment, load_runs
from recurjax.training.objective import Distilled, Exits
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)

FOLDER = Path(__file__).parents[2] / "experiments" / "relaxed_recursive_transformer"
TABLE = FOLDER / "runs.py"
RUNS = load_runs(TABLE)
ADAPTERS = {
    "gemma": (78.4, 156.9, 313.8, 606.3),
    "tinyllama": (50.5, 100.9, 201.9, 377.7),
    "pythia": (37.7, 75.5, 151.0, 302.0),
}
"""Millions of the additions' parameters, ranks 64 to 512, two loops."""
DISTANCES = get_args(Divergence)
BLOCKS = {"gemma": 0.99, "tinyllama": 0.48, "pythia": 0.40}
"""Billions of the shared block's."""


def adapters(stack: RelaxedRecursiveTransformerConfig) -> int:
    """L R (N + M) for each linear map, the rank capped."""
    maps = stack.transformer.block_maps(0).values()
    return stack.layers * sum(min(stack.rank, n, m) * (n + m) for n, m in maps)


@pytest.mark.parametrize("base", ADAPTERS)
def test_additions_have_the_papers_sizes(base):
    for rank, millions in zip((64, 128, 256, 512), ADAPTERS[base], strict=True):
        run = load_experiment(f"{TABLE}:{base}_b2_rank{rank}_60b")
        stack = run.model.stack
        assert (stack.loops, stack.rank, stack.tie_norms) == (2, rank, True)
        assert round(adapters(stack) / 1e6, 1) == millions
        block = sum(n * m for n, m in stack.transformer.block_maps(0).values())
        assert round(block * stack.block_layers / 1e9, 2) == BLOCKS[base]


def test_settings_are_the_papers():
    for name in RUNS:
        run = load_experiment(f"{TABLE}:{name}")
        training, billions = run.training, 60 if name.endswith("60b") else 15
        tokens = training.steps * training.tokens_per_step
        assert tokens == pytest.approx(billions * 1e9, rel=1e-4)
        assert training.length == 2048 and training.tokens_per_step == 2**21
        assert run.optimizer.learning_rate == 2e-4
        assert run.schedule.warmup_steps == (800 if billions == 60 else 200)
        by_name = any(word in name for word in DISTANCES)
        distilled = billions == 60 and "full" not in name or by_name
        assert isinstance(run.objective, Distilled) == distilled
        assert isinstance(run.objective, Exits) == ("exits" in name)
        scratch = "reduced" in name or name.endswith("_random_15b")
        assert (training.start_from is None) == scratch


def test_every_start_is_a_rows_conversion_or_run():
    """By the words of the docstring: `runs/NAME_start`, an import or another row."""
    for name in RUNS:
        start = load_experiment(f"{TABLE}:{name}").training.start_from
        if start is None:
            continue
        stem = start.removeprefix("runs/")
        if stem.endswith("_start"):
            assert name.startswith(stem.removesuffix("_start"))
        elif stem.startswith("rrt_"):
            assert stem.removeprefix("rrt_") in RUNS
        else:
            assert stem in ADAPTERS and "full" in name


def test_an_imported_base_gives_rows_its_vocabulary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = load_experiment(f"{TABLE}:pythia_full_15b")
    assert planned.model.vocabulary == 50277
    assert planned.model.padded_vocabulary == 50304
    model = replace(
        planned.model,
        vocabulary=50000,
        dtype="float32",
        stack=replace(planned.model.stack, remat="nothing"),
    )
    (tmp_path / "runs" / "pythia").mkdir(parents=True)
    write_experiment(
        replace(planned, model=model), tmp_path / "runs" / "pythia" / "config.json"
    )
    expected = replace(planned.model, vocabulary=50000)
    assert load_experiment(f"{TABLE}:pythia_full_15b").model == expected
    distilled = load_experiment(f"{TABLE}:pythia_b2_rank64_60b")
    assert distilled.model.vocabulary == 50000
    assert distilled.objective.frozen.model == expected
    assert load_experiment(f"{TABLE}:gemma_full_15b").model.vocabulary == 256000
