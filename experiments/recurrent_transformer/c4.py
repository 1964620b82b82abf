"""What the paper's C4 runs share; the runs are the files beside.

C4 must be prepared once with the T5 tokenizer (32,100 tokens, padded to 32,128 rows):

    recurjax data prepare --out data/c4 --corpus 'c4/en/*.json.gz' --format jsonl \
        --tokenizer t5/tokenizer.json --validation-fraction 0.0005
    recurjax train experiments/recurrent_transformer/c4_300m_recurrent_12.py

Source: the paper's appendix "C4 pretraining experiments"; what it leaves open is as in
the authors' shipped config: the head is untied, the gradient clipped at 1, the init
truncated at 3 sigma with 1/sqrt(fan in).
"""

from recurjax.data.config import DataConfig, Prepared, TokenizerFile
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

LENGTH = 512
HEAD_WIDTH = 64
INIT = InitConfig(std=None, truncate=3.0, embedding_std=None)


def recurrent(*, layers: int, width: int) -> RecurrentTransformerConfig:
    """Returns the paper's Recurrent Transformer."""
    return RecurrentTransformerConfig(
        layers=layers,
        width=width,
        heads=width // HEAD_WIDTH,
        key_heads=width // HEAD_WIDTH,
        head_width=HEAD_WIDTH,
        mlp=MlpConfig(kind="gelu", width=4 * width),
        init=INIT,
    )


def transformer(*, layers: int, width: int) -> TransformerConfig:
    """Returns the baseline: the same layer with the usual keys and values."""
    return TransformerConfig(
        layers=layers,
        width=width,
        attention=AttentionConfig(
            heads=width // HEAD_WIDTH,
            key_heads=width // HEAD_WIDTH,
            head_width=HEAD_WIDTH,
            position=Alibi(),
            qk_norm=NormConfig(),
            qk_norm_over="full",
        ),
        mlp=MlpConfig(kind="gelu", width=4 * width),
        residual_scale="inverse_sqrt_depth",
        init=INIT,
        remat="block",
    )


def experiment(
    name: str,
    stack: RecurrentTransformerConfig | TransformerConfig,
    *,
    steps: int,
    batch: int = 512,
    rate: float = 3e-3,
) -> Experiment:
    """Returns a run: Adam, warm-up over 40 % of the steps, then a cosine.

    Args:
      name: of the run directory.
      stack: `recurrent` or `transformer`.
      steps: 25,000 at 300M parameters and batch 512; 12,500 at 150M.
      batch: rows of 512 tokens.
      rate: the paper tunes it over 1e-3, 3e-3 and 1e-2; 3e-3 is its best.
    """
    return Experiment(
        name=name,
        model=ModelConfig(
            vocabulary=32100,
            pad_vocabulary_to=128,
            stack=stack,
            dtype="bfloat16",
        ),
        data=DataConfig(
            corpus=Prepared(directory="data/c4"),
            tokenizer=TokenizerFile(path="data/c4/tokenizer"),
        ),
        optimizer=Adam(learning_rate=rate, b1=0.9, b2=0.95, eps=1e-8),
        schedule=Cosine(warmup_steps=round(0.4 * steps), start=0.1, end=0.1),
        training=TrainingConfig(steps=steps, batch=batch, length=LENGTH),
        evaluation=EvaluationConfig(every=1000, batches=40),
    )
