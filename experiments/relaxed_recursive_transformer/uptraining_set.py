"""Code of the small sets: conversions of one base, uptraining, and their table.

Every conversion and every run resumes or is found done, so that a set that was stopped
continues with the same command.
"""

import os
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from threading import Timer

from rich.console import Console

from recurjax.cli.main import main as recurjax
from recurjax.errors import UserError
from recurjax.experiment import Experiment, read_experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text, read_json
from recurjax.files.metric_rows import read_rows
from recurjax.losses.divergence import FrozenModel
from recurjax.model import ModelConfig
from recurjax.training.loop import train
from recurjax.training.objective import Distilled, NextToken, Objective
from recurjax.training.run import RunDirectory
from recurjax.training.sweep import seeded
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

Losses = dict[str, float]
"""Held-out nats per token by the tokens trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to continue from a base.

    Attributes:
      name: name of the run, and of its row in the table.
      convert: options of `recurjax convert to-recursive`; None: the base as it is.
      scratch: instead of a conversion, makes of the base's model one that is trained
        from nothing, as the paper's baselines.
      objective: objective of the uptraining, from the teacher; None: distillation.
      exits: afterwards score its exits: exits.json and exits.png in the run.
    """

    name: str
    convert: tuple[str, ...] | None = None
    scratch: Callable[[ModelConfig], ModelConfig] | None = None
    objective: Callable[[FrozenModel], Objective] | None = None
    exits: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Set:
    """Cases of one base.

    Attributes:
      base: run directory of a Transformer, and the teacher.
      runs: gets one run directory a case and seed, results.json and results.md.
      recipe: makes the uptraining of a start directory; its objective is replaced.
      text: a UTF-8 file for the loss before and after each conversion, if given.
      console: tells of each run.
    """

    base: Path
    runs: Path
    recipe: Callable[[Path, str], Experiment]
    text: Path | None = None
    console: Console = field(default_factory=lambda: Console(stderr=True))

    def run(self, cases: Sequence[Case], *, seeds: int = 1) -> str | None:
        """Runs the missing cases, all seeds of a case before the next case.

        A seed orders the rows; the conversions of a case are one for all its seeds.

        Returns:
          The table, which results.md has too; None when a run was stopped.
        """
        by_name: dict[str, list[Losses]] = {}
        teacher = FrozenModel(
            run=str(self.base), model=read_experiment(self.base / "config.json").model
        )
        self.runs.mkdir(parents=True, exist_ok=True)
        for case, seed in product(cases, range(seeds)):
            losses = self._reach(case, seed, teacher)
            if losses is None:
                self.console.print("stopped: the same command goes on from here")
                return None
            by_name.setdefault(case.name, []).append(losses)
            text = json_text(by_name, indent=1) + "\n"
            write_atomic(self.runs / "results.json", text)
            write_atomic(self.runs / "results.md", table_of(by_name))
        return table_of(by_name)

    def _reach(self, case: Case, seed: int, teacher: FrozenModel) -> Losses | None:
        start = self.base
        if case.convert is not None:
            start = self.runs / f"start_{case.name}"
            if not start.exists():
                self._convert(case, start)
        make = case.objective
        objective = Distilled(teacher=teacher) if make is None else make(teacher)
        run = replace(self.recipe(start, case.name), objective=objective)
        if case.scratch is not None:
            run = replace(
                run,
                model=case.scratch(run.model),
                training=replace(run.training, start_from=None),
            )
        run = seeded(run, seed)
        root = self.runs / run.name
        self.console.rule(run.name)
        if train(run, root, console=self.console).outcome != "finished":
            return None
        losses = {"start": _at_start(start)} if case.convert else {}
        losses = {name: loss for name, loss in losses.items() if loss is not None}
        if case.exits and not (root / "exits.json").exists():
            batch, length = run.training.batch, run.training.length
            words = ["--batch", batch, "--tokens", 8 * batch * length]
            words += ["--fit-head", 100, "--plot", root / "exits.png"]
            words += ["--json", root / "exits.json"]
            _command(["evaluate", "exits", root, *words])
        return losses | losses_of(root, run)

    def _convert(self, case: Case, out: Path) -> None:
        assert case.convert is not None
        words = ["convert", "to-recursive", self.base, out, *case.convert]
        if self.text is not None:
            words += ["--text", self.text, "--samples", 8, "--length", 512]
        _command(words)


def select(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Returns the cases of these names, in this order; no names: all of them.

    Raises:
      UserError: there is no such case.
    """
    known = {case.name: case for case in cases}
    for name in names:
        if name not in known:
            raise UserError(f"--cases must be among {', '.join(known)}, got {name}")
    return [known[name] for name in names or known]


@contextmanager
def stopped_after(minutes: float | None) -> Iterator[None]:
    """Ends the code inside after `minutes` minutes, as SIGTERM ends a training run.

    A run saves first and continues from there with the next command; a conversion or an
    evaluation appears complete or not at all, and is repeated.
    """
    if minutes is None:
        yield
        return
    if not minutes > 0:
        raise UserError(f"--minutes must be above 0, got {minutes}")
    timer = Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def losses_of(root: Path, run: Experiment) -> Losses:
    """Reads a run's validation losses by the tokens trained on."""
    each = run.training.tokens_per_step
    return {
        f"{each * row['step']:,} tokens": row["loss"]
        for row in read_rows(RunDirectory(root).metrics).rows
        if row["kind"] == "validation"
    }


def next_token(teacher: FrozenModel) -> Objective:
    """Returns training without the teacher."""
    return NextToken()


def table_of(losses: Mapping[str, Sequence[Losses]]) -> str:
    """Returns a Markdown table: a row per case with mean and spread over its seeds.

    The spread is the highest less the lowest; a single seed has none.
    """
    columns = list(dict.fromkeys(c for rows in losses.values() for c in rows[0]))
    columns.sort(key=lambda column: column != "start")  # which baselines have not
    lines = [
        "| held-out nats per token | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, seeds in losses.items():
        cells = []
        for column in columns:
            values = [row[column] for row in seeds if column in row]
            spread = f" ({max(values) - min(values):.3f})" if values[1:] else ""
            cells.append(f"{statistics.fmean(values):.3f}{spread}" if values else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def to_recursive(
    loops: int, init: str, rank: int = 0, adapters: str = "svd", *, tied: bool = False
) -> tuple[str, ...]:
    """Returns options of a conversion; `tied`: the loops share their norms."""
    words = ("--loops", str(loops), "--init", init)
    words += () if tied else ("--no-tie-norms",)
    words += ("--rank", str(rank))
    return (*words, "--adapters", adapters) if rank else words


def baselines(loops: int, prefix: str = "") -> list[Case]:
    """Returns the paper's baselines of a recursive model's size, trained from nothing.

    `random` is the recursive model, `reduced` an ordinary one of the block's layers.
    """

    def random(base: ModelConfig) -> ModelConfig:
        assert isinstance(base.stack, TransformerConfig)
        stack = RelaxedRecursiveTransformerConfig(
            transformer=base.stack, loops=loops, tie_norms=False
        )
        return replace(base, stack=stack)

    def reduced(base: ModelConfig) -> ModelConfig:
        assert isinstance(base.stack, TransformerConfig)
        layers = base.stack.layers // loops
        return replace(base, stack=replace(base.stack, layers=layers))

    return [
        Case(name=f"{prefix}random", scratch=random),
        Case(name=f"{prefix}reduced", scratch=reduced),
    ]


def _at_start(start: Path) -> float | None:
    """Returns the loss after a conversion that was given a text."""
    return read_json(start / "report.json", "the conversion's report").get("loss_after")


def _command(words: Sequence[object]) -> None:
    code = recurjax([str(word) for word in words])
    if code:
        raise UserError(f"recurjax {words[0]} {words[1]} failed")
