"""Quickstart: a small byte-level Transformer on Shakespeare, for two CPU cores.

Reproduces no table. Expect validation bits per byte at least 0.3 below those of an
interpolated order-2 byte model on the same tenth of the text, in under four minutes of
training on two cores. Run it with `make quickstart`, or

    recurjax train experiments/quickstart.py
"""

from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.experiment import Experiment
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.self_attention import AttentionConfig
from recurjax.model import ModelConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.optimizer import AdamW
from recurjax.training.schedule import Cosine
from recurjax.variants.transformer import TransformerConfig


def config() -> Experiment:
    """Returns the experiment."""
    return Experiment(
        name="quickstart",
        model=ModelConfig(
            vocabulary=257,
            tied_head=True,
            stack=TransformerConfig(
                layers=2,
                width=128,
                attention=AttentionConfig(heads=4, key_heads=4, head_width=32),
                mlp=MlpConfig(kind="swiglu", width=384),
            ),
        ),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes()),
        optimizer=AdamW(learning_rate=4e-3, b2=0.99),
        schedule=Cosine(warmup_steps=50),
        training=TrainingConfig(
            steps=1000, batch=32, length=128, log_every=10, checkpoint_every=250
        ),
        evaluation=EvaluationConfig(
            every=500, batch=64, sample_prompts=("HAMLET\n",), sample_tokens=300
        ),
    )
