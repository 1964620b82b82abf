"""Thirty steps of attention on MQAR next to PyTorch, from the same weights."""

import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from recurjax.data.tasks import Mqar, Setting, TaskData, TaskDataset
from recurjax.experiment import Experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.initialization import UNIT_VARIANCE
from recurjax.layers.mlp import MlpConfig
from recurjax.model import ModelConfig
from recurjax.parameters import parameter_name
from recurjax.sharding import make_mesh, place
from recurjax.training.config import TrainingConfig
from recurjax.training.objective import NextToken
from recurjax.training.optimizers import Adam, Constant
from recurjax.training.program import build_step
from recurjax.training.spikes import SpikeConfig
from recurjax.types import IGNORED
from recurjax.variants.transformer import TransformerConfig
from tests.torch_python import PYTHON

STEPS, BATCH, LENGTH, HEADS = 30, 16, 32, 4
TASK = Mqar(
    vocabulary=64,
    train=(Setting(LENGTH, 4, 10_000),),
    validation=(Setting(LENGTH, 4, 16),),
)
DATA = TaskData(task=TASK, prefetch=0)
EXPERIMENT = Experiment(
    name="peer",
    model=ModelConfig(
        vocabulary=TASK.vocabulary,
        stack=TransformerConfig(
            layers=2,
            width=32,
            attention=AttentionConfig(heads=HEADS, key_heads=HEADS, head_width=8),
            mlp=MlpConfig(kind="gelu", width=64),
            init=UNIT_VARIANCE,
        ),
    ),
    data=DATA,
    # Logits at the four answers of each row: the peer computes them everywhere.
    objective=NextToken(answers=4),
    optimizer=Adam(learning_rate=3e-3, b2=0.98),
    schedule=Constant(warmup_steps=10),
    training=TrainingConfig(
        steps=STEPS, batch=BATCH, length=LENGTH, spikes=SpikeConfig(enabled=False)
    ),
)


@pytest.mark.torch
def test_losses_and_gradient_norms_are_those_of_a_peer_in_pytorch(tmp_path):
    mesh = make_mesh(EXPERIMENT.mesh)
    step = build_step(EXPERIMENT, mesh)
    state = step.initialise(jax.random.key(0))
    # Copies: a step uses its state up.
    weights: dict[str, Any] = {
        parameter_name(path): np.array(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.model)
    }
    loader = iter(TaskDataset(config=DATA).loader("train", length=LENGTH, batch=BATCH))
    batches = [next(loader) for _ in range(STEPS)]
    assert IGNORED == -1  # what the peer leaves out
    inputs: dict[str, Any] = {
        "heads": HEADS,
        "ids": np.stack([rows["ids"] for rows in batches]),
        "targets": np.stack([rows["targets"] for rows in batches]),
    }
    np.savez(tmp_path / "inputs.npz", **inputs, **weights)
    script = Path(__file__).with_name("torch_peer.py")
    files = (tmp_path / "inputs.npz", tmp_path / "peer.npz")
    subprocess.run([PYTHON, script, *files], check=True, timeout=120)
    losses, norms = [], []
    for rows in batches:
        state, metrics = step(state, place(rows, mesh, batch=BATCH))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["gradient_norm"]))
    peer = np.load(files[1])
    np.testing.assert_allclose(losses, peer["losses"], rtol=1e-5)
    np.testing.assert_allclose(norms, peer["norms"], rtol=1e-5)
    assert losses[-1] < losses[0] - 0.5  # they learn
