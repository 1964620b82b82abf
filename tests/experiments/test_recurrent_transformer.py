from pathlib import Path

import pytest

from recurjax.model import count_parameters
from recurjax.run_table import load_experiment, load_runs
from recurjax.training.optimizers import Adam, Cosine

TABLE = Path(__file__).parents[2] / "experiments" / "recurrent_transformer" / "runs.py"
RUNS = {
    "c4_300m_recurrent_12": 285.5,
    "c4_300m_recurrent_6": 302.0,
    "c4_300m_transformer_24": 302.0,
    "c4_300m_transformer_12": 285.5,
    "c4_300m_transformer_6": 302.0,
    "c4_150m_recurrent_12": 151.0,
    "c4_150m_recurrent_6": 142.8,
    "c4_150m_transformer_12": 151.0,
    "c4_150m_transformer_6": 142.8,
    "c4_150m_recurrent_12_batch256": 151.0,
    "c4_150m_recurrent_6_batch256": 142.8,
    "c4_150m_transformer_12_batch256": 151.0,
    "c4_150m_transformer_6_batch256": 142.8,
    "c4_150m_recurrent_6_batch256_1440": 149.3,
    "c4_150m_transformer_6_batch256_1440": 149.3,
    "c4_150m_recurrent_12_depth_init": 151.0,
    "c4_150m_transformer_12_depth_init": 151.0,
    "c4_150m_unnormed": 151.0,
}
"""Millions of parameters in the blocks, as the paper's sizes give them."""


def test_every_run_is_here():
    assert {name for name in load_runs(TABLE) if name.startswith("c4_")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_papers_size_and_settings(name):
    experiment = load_experiment(f"{TABLE}:{name}")
    count = count_parameters(experiment.model)
    assert count.outside_embedding / 1e6 == pytest.approx(RUNS[name], abs=0.1)
    training, rate = experiment.training, experiment.optimizer.learning_rate
    tokens = training.steps * training.tokens_per_step
    assert tokens / 1e9 == pytest.approx(6.55 if "300m" in name else 3.28, abs=0.01)
    # Appendix "C4 pretraining": Adam of (0.9, 0.95), a cosine from and to a tenth.
    assert experiment.schedule == Cosine(
        warmup_steps=round(0.4 * training.steps), start=0.1, end=0.1
    )
    optimizer = experiment.optimizer
    assert optimizer == Adam(learning_rate=rate, b1=0.9, b2=0.95, eps=1e-8)
    assert (training.batch, training.length) == (256 if "256" in name else 512, 512)
    assert training.gradient_clip == 1.0
    assert rate == (1e-3 if "unnormed" in name else 3e-3)
    assert experiment.name == f"rt_{name}"
    # Depth counts once, in the branches' scale.
    init = experiment.model.stack.init
    assert init.output == ("depth" if "depth_init" in name else "same")
    assert not training.spikes.enabled
    normed = getattr(experiment.model.stack, "normed_persistent", True)
    assert normed == ("unnormed" not in name)


@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
def test_a_synthetic_run_has_mads_settings_and_the_papers_beta2(kind):
    experiment = load_experiment(f"{TABLE}:mad_in_context_recall_{kind}")
    optimizer, training = experiment.optimizer, experiment.training
    assert (optimizer.b1, optimizer.b2, optimizer.weight_decay) == (0.9, 0.98, 0.0)
    assert optimizer.learning_rate in (1e-4, 5e-4, 1e-3)
    assert experiment.schedule.end * optimizer.learning_rate == pytest.approx(1e-6)
    rows = experiment.data.task.count("train")
    assert training.batch == 128
    assert training.steps == 200 * -(-rows // 128)
