"""What the paper's nanochat runs share; the runs are the files beside.

FineWeb-Edu must be prepared once with nanochat's BPE of 32,768 tokens:

    recurjax data prepare --out data/fineweb_edu --corpus 'fineweb_edu/*.parquet' \
        --format parquet --tokenizer nanochat-bpe:32768
    recurjax train experiments/latent_recurrent_transformer/shared_20.py

A file trains at R = 10 tokens a parameter, all parameters counted; another R is another
number of steps, which `python experiments/latent_recurrent_transformer/nanochat.py`
prints. Source: appendix A; the rest is the nanochat of January 2026.
"""

import dataclasses

from recurjax.data.config import DataConfig, Prepared, TokenizerFile
from recurjax.experiment import Experiment
from recurjax.model import ModelConfig, count_parameters
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.muon_adamw import MuonAdamW
from recurjax.training.objective import Interleaved, NextToken, Objective
from recurjax.training.schedule import LinearWarmdown
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.latent_recurrent_transformer.presets import (
    FINAL_NORM,
    PADDED_VOCABULARY,
    layerwise,
    nanochat,
    shared,
)

LENGTH = 2048
BATCH_TOKENS = 2**19
RATIOS = (5, 10, 20, 40, 60, 80, 120)


def model(stack: LatentRecurrentTransformerConfig) -> ModelConfig:
    """Returns the decoder around a stack."""
    return ModelConfig(
        vocabulary=PADDED_VOCABULARY,
        stack=dataclasses.replace(stack, remat="block"),
        final_norm=FINAL_NORM,
        logit_soft_cap=15.0,
        dtype="bfloat16",
    )


def steps(stack: LatentRecurrentTransformerConfig, ratio: float) -> int:
    """Counts the steps of 2^19 tokens that give R tokens a parameter."""
    return round(ratio * count_parameters(model(stack)).total / BATCH_TOKENS)


def experiment(
    name: str,
    stack: LatentRecurrentTransformerConfig,
    *,
    objective: Objective | None = None,
    ratio: float = 10,
) -> Experiment:
    """Returns a run.

    Args:
      name: of the run directory.
      stack: the backbone, with a memory or without.
      objective: None: interleaved with two subsets, or next-token without a memory.
      ratio: R, tokens a parameter.
    """
    default = NextToken() if stack.memory is None else Interleaved(subsets=2)
    return Experiment(
        name=name,
        model=model(stack),
        data=DataConfig(
            corpus=Prepared(directory="data/fineweb_edu"),
            tokenizer=TokenizerFile(path="data/fineweb_edu/tokenizer"),
            packing="best_fit",
        ),
        optimizer=MuonAdamW(dtype="bfloat16"),
        schedule=LinearWarmdown(warmdown=0.5, end=0.0),
        objective=default if objective is None else objective,
        training=TrainingConfig(
            steps=steps(stack, ratio),
            batch=BATCH_TOKENS // LENGTH,
            length=LENGTH,
            gradient_clip=None,
        ),
        evaluation=EvaluationConfig(every=1000, batches=20),
    )


def main() -> None:
    """Prints the steps of every model of the scaling tables at every R."""
    print("model".ljust(14), *(f"R{ratio}".rjust(8) for ratio in RATIOS))
    for layers in (20, 24):
        kinds = {"base": None, "shared": shared(layers), "layerwise": layerwise(layers)}
        for kind, memory in kinds.items():
            stack = nanochat(layers, memory=memory)
            counts = (f"{steps(stack, ratio):,}".rjust(8) for ratio in RATIOS)
            print(f"{layers}L {kind}".ljust(14), *counts)


if __name__ == "__main__":
    main()
