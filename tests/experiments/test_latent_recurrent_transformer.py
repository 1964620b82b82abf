from pathlib import Path

import pytest

from recurjax.model import count_parameters
from recurjax.run_table import load_experiment, load_runs
from recurjax.training.objective import Chunked, Interleaved, NextToken
from recurjax.training.optimizers import LinearWarmdown, MuonAdamW
from recurjax.variants.latent_recurrent_transformer.presets import FINAL_NORM

TABLE = (
    Path(__file__).parents[2]
    / "experiments"
    / "latent_recurrent_transformer"
    / "runs.py"
)
SIZES = {
    "base_20": 1316.0,
    "shared_20": 1319.8,
    "layerwise_20": 1382.0,
    "base_24": 1988.1,
    "shared_24": 1993.7,
    "layerwise_24": 2102.2,
}
"""Millions of parameters, embeddings included."""
ABLATIONS = [
    name
    for name in load_runs(TABLE)
    if name not in SIZES and not name.startswith("shakespeare_")
]
"""And the other ratios of tokens to parameters."""


@pytest.mark.parametrize("name", SIZES)
def test_a_run_has_the_papers_size_and_settings(name):
    experiment = load_experiment(f"{TABLE}:{name}")
    count = count_parameters(experiment.model)
    assert count.total / 1e6 == pytest.approx(SIZES[name], abs=0.1)
    training = experiment.training
    assert training.tokens_per_step == 2**19
    tokens = training.steps * training.tokens_per_step
    assert tokens / count.total == pytest.approx(10, rel=1e-3)
    # Appendix A: two subsets, nanochat's optimizer, down to 0 over the second half.
    wanted = NextToken() if name.startswith("base") else Interleaved(subsets=2)
    assert experiment.objective == wanted
    assert experiment.schedule == LinearWarmdown(warmdown=0.5, end=0.0)
    assert experiment.optimizer == MuonAdamW(dtype="bfloat16")
    assert training.gradient_clip is None and not training.spikes.enabled
    assert training.length == 2048
    assert experiment.model.final_norm == FINAL_NORM
    assert experiment.name == f"lrt_{name}"


@pytest.mark.slow  # Each counts the parameters of 20 layers.
@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_is_a_run(name):
    experiment = load_experiment(f"{TABLE}:{name}")
    assert experiment.name == f"lrt_{name}"
    model = name.rpartition("_r")[0]
    layers = 24 if model.endswith("_24") else 20
    assert experiment.model.stack.layers == layers
    if model in SIZES:
        tokens = experiment.training.steps * experiment.training.tokens_per_step
        ratio = tokens / count_parameters(experiment.model).total
        assert ratio == pytest.approx(int(name.rpartition("_r")[2]), rel=1e-3)


def test_the_papers_ratios_are_here():
    runs = load_runs(TABLE)
    for model in SIZES:
        ratios = (5, 20, 40, 60, 80, *([120] if model.startswith("base") else []))
        assert all(f"{model}_r{ratio}" in runs for ratio in ratios)


def test_tables_7_and_9_say_how_the_memory_is_trained():
    rows = {
        "subsets_4": Interleaved(subsets=4),
        "subsets_8": Interleaved(subsets=8),
        "chunked_64": Chunked(chunk=64),
        "chunked_256": Chunked(chunk=256),
    }
    runs = load_runs(TABLE)
    for name, objective in rows.items():
        assert runs[name].make.keywords["objective"] == objective, name
