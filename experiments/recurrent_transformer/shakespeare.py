"""What the small pair on the embedded text shares; the two runs are the files beside.

Both have two layers of width 64 with ALiBi, full-width qk-norm, exact-erf GELU of width
4 D, branches scaled by 1/sqrt(L) and the same init: the same parameters, so the same
count. They read the same tokens. `shakespeare_pair.py` compares them.
"""

from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.experiment import Experiment
from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Alibi
from recurjax.layers.self_attention import AttentionConfig
from recurjax.model import ModelConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.optimizer import Adam
from recurjax.training.schedule import Cosine
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.transformer import TransformerConfig

LAYERS, WIDTH, HEADS = 2, 64, 4
HEAD_WIDTH = WIDTH // HEADS
MLP = MlpConfig(kind="gelu", width=4 * WIDTH)
INIT = InitConfig(std=None, truncate=3.0, embedding_std=0.1)
STEPS = 200


def recurrent() -> RecurrentTransformerConfig:
    """Returns the Recurrent Transformer."""
    return RecurrentTransformerConfig(
        layers=LAYERS,
        width=WIDTH,
        heads=HEADS,
        key_heads=HEADS,
        head_width=HEAD_WIDTH,
        mlp=MLP,
        init=INIT,
    )


def transformer() -> TransformerConfig:
    """Returns the baseline: the same layer with the usual keys and values."""
    return TransformerConfig(
        layers=LAYERS,
        width=WIDTH,
        attention=AttentionConfig(
            heads=HEADS,
            key_heads=HEADS,
            head_width=HEAD_WIDTH,
            position=Alibi(),
            qk_norm=NormConfig(),
            qk_norm_over="full",
        ),
        mlp=MLP,
        residual_scale="inverse_sqrt_depth",
        init=INIT,
    )


def experiment(
    name: str, stack: RecurrentTransformerConfig | TransformerConfig
) -> Experiment:
    """Returns a run of 819,200 bytes: rows of 64, less than one epoch."""
    return Experiment(
        name=name,
        model=ModelConfig(vocabulary=256, tied_head=True, stack=stack),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes(bos=False)),
        optimizer=Adam(learning_rate=1e-2),
        schedule=Cosine(warmup_steps=STEPS // 10),
        training=TrainingConfig(steps=STEPS, batch=64, length=64),
        evaluation=EvaluationConfig(batch=64),
    )
