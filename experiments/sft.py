"""Fine-tuning of a pretrained model on conversations, by low-rank adapters.

Reproduces no table. Loss counts on what the assistant says; conversations are packed
into rows. `docs/fine-tuning.md` goes from the pretrained model to a chat. Sizes and
vocabulary are those of runs/smollm2, which `recurjax convert from-hf` makes, or
SmolLM2-135M's as long as there is no such run.

    recurjax new mine --from sft     # then set model, start_from and patterns in it
"""

from recurjax.data.config import Conversations, DataConfig, TokenizerFile
from recurjax.experiment import Experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Rope
from recurjax.model import ModelConfig
from recurjax.run_table import model_in
from recurjax.training.config import TrainingConfig
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.variants.transformer import TransformerConfig

BASE = "runs/smollm2"
SMOLLM2 = ModelConfig(
    vocabulary=49152,
    tied_head=True,
    final_norm=NormConfig(eps=1e-5),
    stack=TransformerConfig(
        layers=30,
        width=576,
        attention=AttentionConfig(
            heads=9, key_heads=3, head_width=64, position=Rope(base=100000.0)
        ),
        mlp=MlpConfig(kind="swiglu", width=1536),
        norm=NormConfig(eps=1e-5),
    ),
)


def config() -> Experiment:
    """Returns the experiment."""
    return Experiment(
        name="sft",
        model=model_in(BASE) or SMOLLM2,
        data=DataConfig(
            corpus=Conversations(patterns=("chats.jsonl",)),
            tokenizer=TokenizerFile(path=f"{BASE}/tokenizer"),
        ),
        training=TrainingConfig(
            steps=500,
            batch=8,
            length=512,
            start_from=BASE,
            adapters="lora:16:32",
            checkpoint_every=100,
        ),
        optimizer=AdamW(learning_rate=2e-4, weight_decay=0.0),
        schedule=Cosine(warmup_steps=20, end=0.1),
    )
