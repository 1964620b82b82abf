"""RAT: Bridging RNN Efficiency and Attention Accuracy in Language Modeling.

The paper's runs, and a miniature of them.

Two families, each prepared once:

    recurjax data prepare --out data/pg19 --corpus 'pg19/train/*.txt' \
        --tokenizer gpt2/tokenizer.json --validation-fraction 0.005
    recurjax data prepare --out data/fineweb_edu_llama2 \
        --corpus 'fineweb_edu/*.parquet' --format parquet \
        --tokenizer llama2/tokenizer.json --bos '</s>' --validation-fraction 0.0005
    recurjax train experiments/rat/runs.py:fineweb_4k_rat16 --mesh.fsdp 16

pg19: 200M parameters, D 1024, 12 layers, heads of 64, GPT-2's tokens, 15B of them (the
books five times). fineweb: 1.3B parameters, D 2048, 24 layers, heads of 128, Llama 2's
tokens, 100B of them. Source: the paper's appendix A.2 and the authors' code (decay of
all parameters; betas of the 1.3B runs). Documents run together and nothing resets
between them; Llama 2's are separated by `</s>`, as the authors' preparation appends it.
Departs from the authors: GPT-2's are separated by its one special token, and the first
token after a separator is learned like any other. No step is skipped as a spike.

shakespeare: the same comparison on the embedded text, for two CPU cores, all of one
width and depth on the same 0.8 million bytes; nothing was tuned. rat_shakespeare.py and
length_generalisation.py run it.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from recurjax.data.config import (
    Bytes,
    DataConfig,
    EmbeddedText,
    Prepared,
    PromptAnswer,
    TokenizerFile,
)
from recurjax.experiment import Experiment
from recurjax.layers.initialization import InitConfig
from recurjax.model import ModelConfig
from recurjax.run_table import Run
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.objective import NextToken
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.training.spikes import SpikeConfig
from recurjax.variants.rat import MixerConfig, RatConfig, RatMixerConfig, presets

LONG_BASE = 500_000.0  # of the rotation at 16K in the 1.3B runs


def stack(
    model: str,
    *,
    layers: int,
    width: int,
    heads: int,
    length: int,
    window: int,
    base: float = 10_000.0,
) -> RatConfig:
    """Returns the stack of one of the paper's models.

    Args:
      model: as it is named after the length in `RUNS`: rat16, attention_swa ...;
        with _nope at the end positions are in the window layers only.
      length: T of training, for the gates' biases and the reversed design's chunks.
      window: window of the layers in between (SWA).
      base: base of the rotary embedding.
    """
    size: dict[str, Any] = {"width": width, "heads": heads}
    full = presets.attention(**size, base=base)
    swa = presets.attention(**size, base=base, window=window)
    rat = {c: presets.rat(**size, base=base, chunk=c) for c in (16, 64, 128, 256)}
    patterns: dict[str, tuple[MixerConfig, ...]] = {
        "rnn": (presets.rnn(**size, length=length),),
        "attention": (full,),
        "attention_swa": (full, swa),
        "rat16_swa": (rat[16], swa),
        **{f"rat{chunk}": (mixer,) for chunk, mixer in rat.items()},
        "rat64_token_rope": (replace(rat[64], position_of="token"),),
        "rat64_low_rank_gates": (_low_rank_gates(rat[64]),),
    }
    for chunks in (16, 64, 128):
        mixer = presets.reversed_rat(
            **size, base=base, chunk=length // chunks, length=length
        )
        patterns[f"reversed_{chunks}_chunks"] = (mixer,)
    pattern = patterns[model.removesuffix("_nope")]
    config = presets.stack(*pattern, layers=layers, width=width)
    return presets.without_positions(config) if model.endswith("_nope") else config


def _low_rank_gates(mixer: RatMixerConfig) -> RatMixerConfig:
    """Returns RAT of the same size with full queries and keys, the gates paying.

    4 r D + 2 D^2 = 2 D^2 + 2 (N / H) D^2, so r = N D / (2 H).
    """
    width = mixer.heads * mixer.head_width
    rank = presets.balanced_rank(width, mixer.heads, mixer.groups)
    return replace(mixer, groups=mixer.heads, forget_rank=rank, output_rank=rank)


def _pg19(model: str, length: int, reproduces: str, expected: str) -> Run:
    """Returns a 200M run of 15B tokens: 1M a step, 6e-4 to 1e-6 after 10 % warm-up."""
    make = partial(
        _paper,
        stack=stack(model, layers=12, width=1024, heads=16, length=length, window=1024),
        vocabulary=50257,
        directory="data/pg19",
        optimizer=AdamW(learning_rate=6e-4, b1=0.9, b2=0.98, decay="all"),
        warmup=0.1,
        tokens=15e9,
        batch=2**20 // length,
        length=length,
    )
    return Run(make=make, reproduces=reproduces, expected=expected)


def _fineweb(model: str, length: int, reproduces: str, expected: str) -> Run:
    """Returns a 1.3B run of 100B tokens: 2M a step, 8e-4 to 1e-6 after 5 % warm-up."""
    size: dict[str, Any] = {"layers": 24, "width": 2048, "heads": 16, "window": 1024}
    base = LONG_BASE if length > 4096 else 10_000.0
    make = partial(
        _paper,
        stack=stack(model, **size, length=length, base=base),
        vocabulary=32000,
        directory="data/fineweb_edu_llama2",
        optimizer=AdamW(learning_rate=8e-4, b1=0.9, b2=0.95, decay="all"),
        warmup=0.05,
        tokens=100e9,
        batch=2**21 // length,
        length=length,
    )
    return Run(make=make, reproduces=reproduces, expected=expected)


def _paper(
    name: str,
    *,
    stack: RatConfig,
    vocabulary: int,
    directory: str,
    optimizer: AdamW,
    warmup: float,
    tokens: float,
    batch: int,
    length: int,
) -> Experiment:
    steps = round(tokens / (batch * length))
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
        training=TrainingConfig(
            steps=steps, batch=batch, length=length, spikes=SpikeConfig(enabled=False)
        ),
        evaluation=EvaluationConfig(every=1000, batches=10),
    )


SFT_ROWS = {
    # Rows of the official training splits; NarrativeQA's have two answers each.
    "narrativeqa_summary": 65_494,
    "narrativeqa_full": 65_494,
    "narrativeqa_passage": 65_494,
    "qmsum": 1_257,
    "wikisum": 35_775,
}
SFT_SCORES: dict[int, dict[str, dict[str, float]]] = {
    # By T: F1 of NarrativeQA, ROUGE-L of the others; Tables 4 and 11.
    4096: {
        model: dict(
            zip(
                ("narrativeqa_summary", "narrativeqa_full", "qmsum", "wikisum"),
                scores,
                strict=True,
            )
        )
        for model, scores in {
            "rnn": (30.5, 27.4, 23.2, 34.3),
            "rat16": (60.8, 43.5, 23.3, 36.6),
            "attention": (61.3, 33.0, 23.4, 36.8),
            "attention_swa": (63.3, 39.6, 23.4, 36.7),
            "rat16_swa": (63.2, 43.7, 24.6, 36.7),
        }.items()
    },
    16384: {
        "rnn": {"narrativeqa_passage": 15.4, "qmsum": 22.8},
        "rat16": {"narrativeqa_passage": 21.6, "qmsum": 24.2},
        "attention": {"narrativeqa_passage": 23.3, "qmsum": 23.8},
        "attention_swa": {"narrativeqa_passage": 20.3, "qmsum": 23.3},
        "rat16_swa": {"narrativeqa_passage": 22.6, "qmsum": 24.6},
    },
}


def _sft(model: str, task: str, score: float, *, length: int) -> Run:
    """Returns a 1.3B run that continues with a task's answers at its T.

    It reads data/sft/TASK/train.jsonl, which sft_sets.py writes. The authors choose the
    number of epochs by the test, 1 to 2 for answers and more for summaries: here it is
    1 and 3.
    """
    make = partial(_answers, model=model, task=task, length=length)
    table = "Table 4" if length == 4096 else "Table 11"
    return Run(make=make, reproduces=table, expected=f"{score} on the test")


def _answers(name: str, *, model: str, task: str, length: int) -> Experiment:
    stem = f"fineweb_{length // 1024}k_{model}"
    before = RUNS[stem].make(stem)
    batch, epochs = (32, 3) if task == "qmsum" else (128, 3 if task == "wikisum" else 1)
    held_out = 0.02
    steps = epochs * round((1 - held_out) * SFT_ROWS[task] / batch)
    assert isinstance(before.data, DataConfig)
    return replace(
        before,
        name=f"rat_{name}",
        data=replace(
            before.data,
            corpus=PromptAnswer(patterns=(f"data/sft/{task}/train.jsonl",)),
            validation_fraction=held_out,
        ),
        optimizer=AdamW(
            learning_rate=1e-5, b1=0.9, b2=0.95, weight_decay=0.01, decay="all"
        ),
        schedule=Cosine(warmup_steps=round(0.05 * steps), end=0.1),
        training=replace(
            before.training, steps=steps, batch=batch, start_from=f"runs/rat_{stem}"
        ),
        evaluation=EvaluationConfig(every=max(1, steps // 4), batches=10),
    )


SMALL_STEPS = 400


def _small(model: str, reproduces: str, *, length: int = 256) -> Run:
    """Returns a small run: 2,048 bytes per step, the same for every stack."""
    expected = "bits per byte in recurjax/variants/rat/README.md"
    make = partial(_tiny, model=model, length=length)
    return Run(make=make, reproduces=reproduces, expected=expected)


def _tiny(name: str, *, model: str, length: int) -> Experiment:
    size = {"layers": 4, "width": 64, "heads": 4}
    window = length // 4  # 1024 of 4096 in the paper
    config = stack(model, **size, length=length, window=window)
    # Weights that suit so small a model.
    init = InitConfig(std=None, embedding_std=0.1, output="same")
    return Experiment(
        name=name.removeprefix("shakespeare_"),
        model=ModelConfig(
            vocabulary=256, tied_head=True, stack=replace(config, init=init)
        ),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes(bos=False)),
        optimizer=AdamW(learning_rate=3e-3, b2=0.99),
        schedule=Cosine(warmup_steps=SMALL_STEPS // 10, end=0.01),
        training=TrainingConfig(
            steps=SMALL_STEPS,
            batch=2048 // length,
            length=length,
            log_every=10,
            checkpoint_every=100,
        ),
        evaluation=EvaluationConfig(batch=16),
    )


RUNS: dict[str, Run] = {
    # 1.3B parameters, FineWeb-Edu, T 4,096.
    "fineweb_4k_rnn": _fineweb("rnn", 4096, "Fig. 4(c)", "perplexity in a figure only"),
    "fineweb_4k_rat64": _fineweb(
        "rat64", 4096, "Fig. 4(c)", "perplexity in a figure only"
    ),
    "fineweb_4k_rat16": _fineweb("rat16", 4096, "Table 1", "perplexity 7.67"),
    "fineweb_4k_attention": _fineweb("attention", 4096, "Table 1", "perplexity 7.61"),
    "fineweb_4k_attention_swa": _fineweb(
        "attention_swa", 4096, "Table 1", "perplexity 7.61"
    ),
    "fineweb_4k_rat16_swa": _fineweb("rat16_swa", 4096, "Table 1", "perplexity 7.57"),
    "fineweb_4k_attention_swa_nope": _fineweb(
        "attention_swa_nope", 4096, "Table 10", "perplexity 7.69"
    ),
    "fineweb_4k_rat16_swa_nope": _fineweb(
        "rat16_swa_nope", 4096, "Table 10", "perplexity 7.63"
    ),
    # The same at T 16,384.
    "fineweb_16k_rnn": _fineweb("rnn", 16384, "Table 11", "perplexity 8.09"),
    "fineweb_16k_rat16": _fineweb("rat16", 16384, "Table 11", "perplexity 7.52"),
    "fineweb_16k_attention": _fineweb(
        "attention", 16384, "Table 11", "perplexity 7.44"
    ),
    "fineweb_16k_attention_swa": _fineweb(
        "attention_swa", 16384, "Table 11", "perplexity 7.45"
    ),
    "fineweb_16k_rat16_swa": _fineweb(
        "rat16_swa", 16384, "Table 11", "perplexity 7.42"
    ),
    # The 1.3B models after fine-tuning on answers; names say 16k for T 16,384.
    **{
        f"sft_{'16k_' if length == 16384 else ''}{task}_{model}": _sft(
            model, task, score, length=length
        )
        for length, models in SFT_SCORES.items()
        for model, scores in models.items()
        for task, score in scores.items()
    },
    # 200M parameters, PG19, at three lengths.
    "pg19_8k_rnn": _pg19("rnn", 8192, "Fig. 4(b)", "perplexity 14.31"),
    "pg19_8k_rat256": _pg19("rat256", 8192, "Fig. 4(b)", "perplexity 13.72"),
    "pg19_8k_rat128": _pg19("rat128", 8192, "Table 9", "perplexity 13.57"),
    "pg19_8k_rat64": _pg19("rat64", 8192, "Table 9", "perplexity 13.42"),
    "pg19_8k_attention": _pg19("attention", 8192, "Table 9", "perplexity 13.26"),
    "pg19_8k_reversed_16_chunks": _pg19(
        "reversed_16_chunks", 8192, "Table 9", "perplexity 13.69"
    ),
    "pg19_8k_reversed_64_chunks": _pg19(
        "reversed_64_chunks", 8192, "Table 9", "perplexity 14.21"
    ),
    "pg19_8k_reversed_128_chunks": _pg19(
        "reversed_128_chunks", 8192, "Table 9", "perplexity 14.53"
    ),
    "pg19_8k_rat64_token_rope": _pg19(
        "rat64_token_rope", 8192, "Fig. 4(a)", "perplexity 0.3 above pg19_8k_rat64"
    ),
    "pg19_8k_rat64_low_rank_gates": _pg19(
        "rat64_low_rank_gates",
        8192,
        "Fig. 4(a)",
        "perplexity 0.4 to 0.5 above pg19_8k_rat64",
    ),
    "pg19_16k_rnn": _pg19("rnn", 16384, "Fig. 4(b)", "perplexity far above 14.31"),
    "pg19_16k_rat256": _pg19(
        "rat256", 16384, "Fig. 4(b)", "perplexity above pg19_16k_rat128's"
    ),
    "pg19_16k_rat128": _pg19("rat128", 16384, "Table 9", "perplexity 13.44"),
    "pg19_16k_rat64": _pg19("rat64", 16384, "Table 9", "perplexity 13.34"),
    "pg19_16k_attention": _pg19("attention", 16384, "Table 9", "perplexity 13.10"),
    "pg19_16k_reversed_16_chunks": _pg19(
        "reversed_16_chunks", 16384, "Table 9", "perplexity 13.48"
    ),
    "pg19_16k_reversed_64_chunks": _pg19(
        "reversed_64_chunks", 16384, "Table 9", "perplexity 14.06"
    ),
    "pg19_16k_reversed_128_chunks": _pg19(
        "reversed_128_chunks", 16384, "Table 9", "perplexity 14.35"
    ),
    "pg19_32k_rnn": _pg19("rnn", 32768, "Fig. 4(b)", "perplexity far above 14.31"),
    "pg19_32k_rat256": _pg19(
        "rat256", 32768, "Fig. 4(b)", "perplexity above pg19_32k_rat128's"
    ),
    "pg19_32k_rat128": _pg19("rat128", 32768, "Table 9", "perplexity 13.66"),
    "pg19_32k_rat64": _pg19("rat64", 32768, "Table 9", "perplexity 13.39"),
    "pg19_32k_attention": _pg19("attention", 32768, "Table 9", "perplexity 13.19"),
    "pg19_32k_reversed_16_chunks": _pg19(
        "reversed_16_chunks", 32768, "Table 9", "perplexity 13.50"
    ),
    "pg19_32k_reversed_64_chunks": _pg19(
        "reversed_64_chunks", 32768, "Table 9", "perplexity 14.02"
    ),
    "pg19_32k_reversed_128_chunks": _pg19(
        "reversed_128_chunks", 32768, "Table 9", "perplexity 14.37"
    ),
    # Four layers of width 64 on the embedded text, T 256.
    "shakespeare_rnn": _small("rnn", "no table: Figs. 4 and 6 in miniature"),
    "shakespeare_rat64": _small("rat64", "no table: Fig. 4 in miniature"),
    "shakespeare_rat16": _small("rat16", "no table: Fig. 4 in miniature"),
    "shakespeare_attention": _small("attention", "no table: Fig. 4 in miniature"),
    "shakespeare_rat16_swa": _small(
        "rat16_swa", "no table: Figs. 4 and 6 in miniature"
    ),
    "shakespeare_attention_swa": _small(
        "attention_swa", "no table: Fig. 6 in miniature"
    ),
    "shakespeare_rat16_swa_nope": _small(
        "rat16_swa_nope", "no table: Fig. 6 in miniature"
    ),
    "shakespeare_attention_swa_nope": _small(
        "attention_swa_nope", "no table: Fig. 6 in miniature"
    ),
    # The same at T 512, where attention has more to find; the four hybrids too.
    **{
        f"shakespeare_t512_{model}": _small(
            model, "no table: Figs. 4 and 6 in miniature, T 512", length=512
        )
        for model in (
            *("rnn", "rat64", "rat16", "attention"),
            *("rat16_swa", "attention_swa", "rat16_swa_nope", "attention_swa_nope"),
        )
    },
}
