"""Runs one training step and prints the bytes that it took: a process of its own.

    python tests/plan/measured_step.py EXPERIMENT

The peak of resident memory is reset once everything is compiled and the initial state
made, so that what is left is the state, the batch and the step's own peak. It is also
the experiment file that the test plans: large enough that allocators' slack is small.
"""

import gc
import json
import sys
from pathlib import Path

import jax

from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.experiment import Experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.model import ModelConfig
from recurjax.plan.programs import build_program
from recurjax.run_table import load_experiment
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training.config import TrainingConfig
from recurjax.training.optimizers import AdamW
from recurjax.variants.transformer import TransformerConfig


def config() -> Experiment:
    """Returns a Transformer of 7M parameters on 4,096 tokens."""
    return Experiment(
        name="measured",
        model=ModelConfig(
            vocabulary=257,
            stack=TransformerConfig(
                layers=2,
                width=512,
                attention=AttentionConfig(heads=8, key_heads=8, head_width=64),
                mlp=MlpConfig(kind="gelu", width=2048),
            ),
        ),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes()),
        optimizer=AdamW(learning_rate=1e-3),
        training=TrainingConfig(steps=2, batch=16, length=256),
    )


def main(file: Path) -> None:
    """Prints {"peak": bytes}."""
    experiment = load_experiment(file)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        program = build_program(experiment, "train", mesh)
        compiled = program.function.lower(*program.arguments).compile()
        zeros = (
            jax.jit(
                lambda: jax.tree.map(
                    lambda leaf: jax.numpy.full(leaf.shape, 1, leaf.dtype),
                    program.arguments,
                ),
                out_shardings=jax.tree.map(
                    lambda leaf: leaf.sharding, program.arguments
                ),
            )
            .lower()
            .compile()
        )
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        jax.block_until_ready(compiled(*zeros()))
    print(json.dumps({"peak": _status("VmHWM") - before}))


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
