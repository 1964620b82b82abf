"""The paper's runs are those of the paper."""

from pathlib import Path

import pytest

from recurjax.run_table import load_experiment, load_runs
from recurjax.training.objective import Distilled, Exits
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.relaxed_recursive_transformer.config import linear_maps

FOLDER = Path(__file__).parents[2] / "experiments" / "relaxed_recursive_transformer"
TABLE = FOLDER / "runs.py"
RUNS = load_runs(TABLE)
ADAPTERS = {
    "gemma": (78.4, 156.9, 313.8, 606.3),
    "tinyllama": (50.5, 100.9, 201.9, 377.7),
    "pythia": (37.7, 75.5, 151.0, 302.0),
}
"""Millions of the additions' parameters, ranks 64 to 512, two loops."""
BLOCKS = {"gemma": 0.99, "tinyllama": 0.48, "pythia": 0.40}
"""Billions of the shared block's."""


def adapters(stack: RelaxedRecursiveTransformerConfig) -> int:
    """L R (N + M) for each linear map, the rank capped."""
    maps = linear_maps(stack.transformer).values()
    return stack.layers * sum(min(stack.rank, n, m) * (n + m) for n, m in maps)


@pytest.mark.parametrize("base", ADAPTERS)
def test_additions_have_the_papers_sizes(base):
    for rank, millions in zip((64, 128, 256, 512), ADAPTERS[base], strict=True):
        run = load_experiment(f"{TABLE}:{base}_b2_rank{rank}_60b")
        stack = run.model.stack
        assert (stack.loops, stack.rank, stack.tie_norms) == (2, rank, True)
        assert round(adapters(stack) / 1e6, 1) == millions
        block = sum(n * m for n, m in linear_maps(stack.transformer).values())
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
        distilled = billions == 60 and "full" not in name
        assert isinstance(run.objective, Distilled) == distilled
        assert isinstance(run.objective, Exits) == ("exits" in name)
        assert (training.start_from is None) == ("reduced" in name)
