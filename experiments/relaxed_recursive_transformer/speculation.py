"""Speculation by the first loop: accepted drafts, tokens per step and per second.

No table of the paper. A recursive byte model of two loops learns Shakespeare, with
losses at its exits, so that its first loop predicts too, and without. Then engines
continue the same held-out prompts, plainly and with `speculate` k, in turns. Expected
of a step are (1 - a^k) / (1 - a) tokens for k + 1 passes of the block, where a is the
share of accepted drafts; plain decoding takes 2 passes for a token. Prints both next to
what was measured. A stopped set continues with the same command.

    python experiments/relaxed_recursive_transformer/speculation.py
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console

from recurjax.bench.timing import in_turns
from recurjax.cli.options import parse, run_script
from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.data.dataset import open_dataset
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.inference.engine import Engine, EngineConfig, RequestSettings
from recurjax.inference.sampling import SamplingConfig
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.machine import host
from recurjax.model import Decoder, ModelConfig
from recurjax.ranges import NonNegativeFloat, PositiveInt, RangeChecks
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.loop import train
from recurjax.training.objective import Exits, NextToken
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.training.run import load_run
from recurjax.training.sweep import seeded, table_of, tell
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

LOOPS = 2
OBJECTIVES = {"exits": Exits(coefficient=0.5), "plain": NextToken()}
_DATA = DataConfig(corpus=EmbeddedText(), tokenizer=Bytes(bos=False))
_PROMPT, _HEADS = 32, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(RangeChecks):
    """Trains what is not trained yet, measures and prints the table.

    Attributes:
      runs: one run directory each, and results.md.
      speculate: k of each engine next to plain decoding.
      temperature: of the texts; 0: greedy.
      layers: layers as they are run.
      width: D.
      steps: steps of each run, 32 rows of 64 bytes each.
      texts: how many an engine continues in a timed call.
      slots: how many of them at once.
      tokens: new ones of each text.
      repeats: timed calls, of which the fastest counts.
      seeds: how many runs of each objective.
    """

    runs: Path = Path("runs/speculation")
    speculate: tuple[PositiveInt, ...] = (1, 2, 4, 8)
    temperature: NonNegativeFloat = 0.0
    layers: PositiveInt = 4
    width: PositiveInt = 128
    steps: PositiveInt = 150
    texts: PositiveInt = 4
    slots: PositiveInt = 1
    tokens: PositiveInt = 128
    repeats: PositiveInt = 5
    seeds: PositiveInt = 3


def experiment(options: Options, objective: str) -> Experiment:
    """Returns a training of the recursive model."""
    transformer = TransformerConfig(
        layers=options.layers,
        width=options.width,
        attention=AttentionConfig(
            heads=_HEADS, key_heads=_HEADS, head_width=options.width // _HEADS
        ),
        mlp=MlpConfig(kind="gelu", width=4 * options.width),
        init=InitConfig(std=None, embedding_std=0.1),
    )
    stack = RelaxedRecursiveTransformerConfig(
        transformer=transformer, loops=LOOPS, tie_norms=False
    )
    return Experiment(
        name=objective,
        model=ModelConfig(vocabulary=256, tied_head=True, stack=stack),
        data=_DATA,
        objective=OBJECTIVES[objective],
        optimizer=AdamW(learning_rate=3e-3),
        schedule=Cosine(warmup_steps=options.steps // 10, end=0.1),
        training=TrainingConfig(
            steps=options.steps,
            batch=32,
            length=64,
            checkpoint_every=max(1, options.steps // 2),
        ),
        evaluation=EvaluationConfig(batch=32),
    )


def prompts(count: int) -> list[np.ndarray]:
    """Draws beginnings of texts from the held-out part."""
    text, draw = open_dataset(_DATA).tokens("validation"), np.random.default_rng(0)
    starts = draw.integers(len(text) - _PROMPT, size=count)
    return [text[at : at + _PROMPT] for at in starts]


def measure(
    model: Decoder, options: Options, beginnings: Sequence[np.ndarray]
) -> dict[int, dict[str, float]]:
    """Continues the prompts on each engine in turns; returns a row for each k."""
    settings = RequestSettings(
        max_new_tokens=options.tokens,
        sampling=SamplingConfig(temperature=options.temperature),
    )

    def engine(k: int | None) -> Engine:
        length = _PROMPT + options.tokens
        config = EngineConfig(
            slots=options.slots,
            length=length,
            prefill_tokens=_PROMPT,
            steps=32,
            speculate=k,
        )
        return Engine(model, config)

    def serve(engine: Engine) -> None:
        for stream, prompt in enumerate(beginnings):
            engine.submit(prompt, replace(settings, stream=stream))
        while engine.busy:
            engine.step()

    engines = {k: engine(k) for k in (None, *options.speculate)}
    calls = {k: lambda e=e: serve(e) for k, e in engines.items()}
    times = in_turns(calls, repeats=options.repeats, warmup=1)
    plain, rows = min(times[None]), {}
    for k in options.speculate:
        counts = engines[k].counts
        a = counts.accepted_tokens / max(counts.verified_tokens, 1)
        expected = sum(a**n for n in range(k))
        # Of a request the first token is drawn from its prompt.
        drawn = counts.new_tokens - counts.submitted
        rows[k] = {
            "accepted": a,
            "tokens per step": drawn / (counts.steps * options.slots),
            "expected tokens": expected,
            "tokens/s": options.texts * options.tokens / min(times[k]),
            "of plain decoding": plain / min(times[k]),
            "by passes": expected * LOOPS / (k + LOOPS - 1),
        }
    return rows


def main(argv: list[str] | None = None) -> int:
    """Trains, measures and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="speculation.py")
    console, results = Console(stderr=True), {}
    beginnings = prompts(options.texts)
    for seed, objective in product(range(options.seeds), OBJECTIVES):
        run = seeded(experiment(options, objective), seed)
        console.rule(run.name)
        root = options.runs / run.name
        if train(run, root, console=console).outcome != "finished":
            console.print("stopped: the same command goes on from here")
            return 130
        model = load_run(root, report=console.print).model
        for k, row in measure(model, options, beginnings).items():
            tell(results, f"{objective}, k {k}", seed, row)
        table = table_of("speculation", results)
        write_atomic(options.runs / "results.md", table)
    print(table_of("speculation", results), end="")
    return 0


if __name__ == "__main__":
    host.prepare()
    run_script(main)
