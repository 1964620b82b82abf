"""What the paper's runs share; the runs are the files beside.

Two families, each prepared once:

    recurjax data prepare --out data/pg19 --corpus 'pg19/train/*.txt' \
        --tokenizer gpt2/tokenizer.json --validation-fraction 0.005
    recurjax data prepare --out data/fineweb_edu --corpus 'fineweb_edu/*.parquet' \
        --format parquet --tokenizer llama2/tokenizer.json \
        --validation-fraction 0.0005
    recurjax train experiments/rat/fineweb_4k_rat16.py --mesh.fsdp 16

pg19: 200M parameters, D 1024, 12 layers, heads of 64, GPT-2's tokens, 15B of them (the
books five times). fineweb: 1.3B parameters, D 2048, 24 layers, heads of 128, Llama 2's
tokens, 100B of them. Source: the paper's appendix A.2 and the authors' code (decay of
all parameters; betas of the 1.3B runs). Documents run together and nothing resets
between them. Departs from the authors: the tokens between documents are the
tokenizer's BOS, and the first token after one is learned like any other.
"""

from dataclasses import replace

from recurjax.data.config import DataConfig, Prepared, TokenizerFile
from recurjax.experiment import Experiment
from recurjax.model import ModelConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.objective import NextToken
from recurjax.training.optimizer import AdamW
from recurjax.training.schedule import Cosine
from recurjax.variants.rat import (
    AttentionMixerConfig,
    MixerConfig,
    RatMixerConfig,
    ReversedRatMixerConfig,
    RnnMixerConfig,
    presets,
)

SMALL = {"width": 1024, "heads": 16}
LARGE = {"width": 2048, "heads": 16}
WINDOW = 1024
LONG_BASE = 500_000.0  # of the rotation at 16K in the 1.3B runs


def pg19(name: str, *pattern: MixerConfig, length: int) -> Experiment:
    """Returns a 200M run of 15B tokens: 1M a step, 6e-4 to 1e-6 after 10 % warm-up.

    Args:
      name: of the run directory.
      pattern: the mixers of layers 0, 1, ..., repeated.
      length: T: 8192, 16384 or 32768.
    """
    return _experiment(
        name,
        *pattern,
        layers=12,
        width=SMALL["width"],
        vocabulary=50257,
        directory="data/pg19",
        optimizer=AdamW(learning_rate=6e-4, b1=0.9, b2=0.98, decay="all"),
        warmup=0.1,
        tokens=15e9,
        batch=2**20 // length,
        length=length,
    )


def fineweb(
    name: str, *pattern: MixerConfig, length: int = 4096, positions: bool = True
) -> Experiment:
    """Returns a 1.3B run of 100B tokens: 2M a step, 8e-4 to 1e-6 after 5 % warm-up.

    Args:
      name: of the run directory.
      pattern: the mixers of layers 0, 1, ..., repeated.
      length: T: 4096, or 16384, whose rotations have base 500,000.
      positions: False: positions in window layers only (NoPE).
    """
    if length > 4096:
        pattern = tuple(_with_base(mixer, LONG_BASE) for mixer in pattern)
    run = _experiment(
        name,
        *pattern,
        layers=24,
        width=LARGE["width"],
        vocabulary=32000,
        directory="data/fineweb_edu",
        optimizer=AdamW(learning_rate=8e-4, b1=0.9, b2=0.95, decay="all"),
        warmup=0.05,
        tokens=100e9,
        batch=2**21 // length,
        length=length,
    )
    if positions:
        return run
    stack = presets.without_positions(run.model.stack)  # pyright: ignore[reportArgumentType]
    return replace(run, model=replace(run.model, stack=stack))


def low_rank_gates(mixer: RatMixerConfig) -> RatMixerConfig:
    """Returns RAT of the same size with full queries and keys, the gates paying.

    4 r D + 2 D^2 = 2 D^2 + 2 (N / H) D^2, so r = N D / (2 H).
    """
    width = mixer.heads * mixer.head_width
    rank = presets.balanced_rank(width, mixer.heads, mixer.groups)
    return replace(mixer, groups=mixer.heads, forget_rank=rank, output_rank=rank)


def _experiment(
    name: str,
    *pattern: MixerConfig,
    layers: int,
    width: int,
    vocabulary: int,
    directory: str,
    optimizer: AdamW,
    warmup: float,
    tokens: float,
    batch: int,
    length: int,
) -> Experiment:
    steps = round(tokens / (batch * length))
    stack = presets.stack(*pattern, layers=layers, width=width)
    return Experiment(
        name=f"rat_{name}",
        model=ModelConfig(
            vocabulary=vocabulary,
            pad_vocabulary_to=128,
            tied_head=True,
            stack=replace(stack, remat="block"),
            dtype="bfloat16",
        ),
        data=DataConfig(
            corpus=Prepared(directory=directory),
            tokenizer=TokenizerFile(path=f"{directory}/tokenizer"),
        ),
        objective=NextToken(vocabulary_chunks=8),
        optimizer=optimizer,
        schedule=Cosine(
            warmup_steps=round(warmup * steps), end=1e-6 / optimizer.learning_rate
        ),
        training=TrainingConfig(steps=steps, batch=batch, length=length),
        evaluation=EvaluationConfig(every=1000, batches=10),
    )


def _with_base(mixer: MixerConfig, base: float) -> MixerConfig:
    """Changes the rotation's base, where the mixer has one."""
    match mixer:
        case RnnMixerConfig():
            return mixer
        case AttentionMixerConfig():
            rope = replace(mixer.attention.position, base=base)  # pyright: ignore[reportArgumentType]
            attention = replace(mixer.attention, position=rope)
            return replace(mixer, attention=attention)
        case RatMixerConfig() | ReversedRatMixerConfig():
            assert mixer.position is not None
            return replace(mixer, position=replace(mixer.position, base=base))
