"""A 12-layer byte model made recursive: inits, LoRA, distillation and exits.

The paper's claims in miniature, on two CPU cores and three seeds: a Transformer of
width 256 is trained on at least 20 MB of English bytes (--steps for some 40 minutes),
made recursive with two loops, and trained on for a tenth of its tokens: Stepwise,
Average and Lower, and a random block between the pretrained embedding and head;
LoRA of rank 8, 32 and 128 from Average, by SVD, and of rank 32 from
zero; all distilled from the base, Stepwise also without it, with losses at the exits,
and with the paper's tied norms; the base itself trained on alike. The paper's two
baselines start from nothing and have the same teacher and tokens: `random`, a recursive
model, and `reduced`, an ordinary one of six layers. Expect Stepwise lowest of the bare
inits and far below both baselines, singular values below zero, a lower loss with the
teacher, and exits that cost little. Prints held-out nats per byte over tokens;
`stepwise_exits` has exits.json and exits.png. A set that was stopped, by Ctrl-C or
--minutes, continues with the same command; --cases says which part of the grid to do.

    python experiments/relaxed_recursive_transformer/byte_model.py --text english.txt
    python experiments/relaxed_recursive_transformer/byte_model.py --text english.txt \
        --cases stepwise average random --minutes 9
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from uptraining_set import (
    Case,
    Set,
    baselines,
    next_token,
    select,
    stopped_after,
    to_recursive,
)

from recurjax.cli.options import parse, run_script
from recurjax.data.config import Bytes, DataConfig, TextFiles
from recurjax.experiment import Experiment, read_experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.losses.divergence import FrozenModel
from recurjax.machine import host
from recurjax.model import ModelConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.loop import train
from recurjax.training.objective import Distilled, Exits, Objective
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.variants.transformer import TransformerConfig

LOOPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the base, converts it and trains on, case by case.

    Attributes:
      text: UTF-8 files, a pattern; the last tenth is for validation.
      runs: gets the base, a run directory a case and seed, results.json and results.md.
      layers: layers of the base, twice those of the block.
      width: D, a multiple of 64 or below it.
      steps: steps of the base; a case takes a tenth of them.
      batch: rows of a step.
      length: T of a row.
      seeds: how many runs of each case, all of them before the next case.
      cases: which, in this order; none named: all.
      minutes: after which to stop and save; None: when all is done.
    """

    text: str
    runs: Path = Path("runs/recursive_bytes")
    layers: int = 12
    width: int = 256
    steps: int = 6000
    batch: int = 8
    length: int = 256
    seeds: int = 3
    cases: tuple[str, ...] = ()
    minutes: float | None = None


def exits(teacher: FrozenModel) -> Objective:
    """Returns losses at the exits, the teacher's in them."""
    return Exits(distilled=Distilled(teacher=teacher))


CASES = (
    Case(name="base_on", objective=next_token),
    *baselines(LOOPS),
    Case(name="random_block", convert=to_recursive(LOOPS, "random")),
    *(
        Case(name=init, convert=to_recursive(LOOPS, init))
        for init in ("average", "lower", "stepwise")
    ),
    *(
        Case(name=f"{init}_tied", convert=to_recursive(LOOPS, init, tied=True))
        for init in ("average", "stepwise")
    ),
    Case(
        name="stepwise_alone",
        convert=to_recursive(LOOPS, "stepwise"),
        objective=next_token,
    ),
    Case(
        name="stepwise_exits",
        convert=to_recursive(LOOPS, "stepwise"),
        objective=exits,
        exits=True,
    ),
    Case(name="rank32_zero", convert=to_recursive(LOOPS, "average", 32, "zero")),
    *(
        Case(name=f"rank{rank}_svd", convert=to_recursive(LOOPS, "average", rank))
        for rank in (8, 32, 128)
    ),
)


def base(options: Options) -> Experiment:
    """Returns the training of the byte model."""
    heads = max(1, options.width // 64)
    stack = TransformerConfig(
        layers=options.layers,
        width=options.width,
        attention=AttentionConfig(
            heads=heads, key_heads=heads, head_width=options.width // heads
        ),
        mlp=MlpConfig(kind="swiglu", width=options.width * 8 // 3),
    )
    return Experiment(
        name="base",
        model=ModelConfig(vocabulary=257, stack=stack),
        data=DataConfig(
            corpus=TextFiles(patterns=(options.text,)),
            tokenizer=Bytes(),
            validation_fraction=0.1,
        ),
        optimizer=AdamW(learning_rate=1e-3),
        schedule=Cosine(warmup_steps=max(1, options.steps // 20), end=0.1),
        training=training(options, options.steps, None),
        evaluation=evaluation(options.steps),
    )


def training(options: Options, steps: int, start: str | None) -> TrainingConfig:
    """Returns a training of `steps` steps from a start."""
    return TrainingConfig(
        steps=steps,
        batch=options.batch,
        length=options.length,
        start_from=start,
        log_every=max(1, min(20, steps // 10)),
        checkpoint_every=max(1, steps // 4),
        keep_checkpoints=1,
    )


def evaluation(steps: int) -> EvaluationConfig:
    """Returns five validations of a run."""
    return EvaluationConfig(every=max(1, steps // 5), batches=32)


def recipe(options: Options, start: Path, name: str) -> Experiment:
    """Returns a tenth of the base's steps from a converted model."""
    steps = max(1, options.steps // 10)
    original = base(options)
    return replace(
        original,
        name=name,
        model=read_experiment(start / "config.json").model,
        optimizer=AdamW(learning_rate=3e-4),
        schedule=Cosine(warmup_steps=max(1, steps // 10), end=0.1),
        training=training(options, steps, str(start)),
        evaluation=evaluation(steps),
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the missing cases and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="byte_model.py")
    cases = select(CASES, options.cases)
    with stopped_after(options.minutes):
        return run(options, cases)


def run(options: Options, cases: Sequence[Case]) -> int:
    """Trains the base, then the cases; returns the exit status."""
    root, console = options.runs / "base", Console(stderr=True)
    console.rule("base")
    if train(base(options), root, console=console).outcome != "finished":
        console.print("stopped: the same command goes on from here")
        return 130
    runs = Set(
        base=root,
        runs=options.runs,
        recipe=lambda start, name: recipe(options, start, name),
        console=console,
    )
    table = runs.run(cases, seeds=options.seeds)
    if table is None:
        return 130
    print(table, end="")
    return 0


if __name__ == "__main__":
    host.prepare()
    run_script(main)
