"""Trains several runs under one folder, one after another, and tabulates results.

Each run resumes by itself, so a stopped sweep continues where it was. A run that
diverges is reported and skipped. Reports of a run come from its own files.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from recurjax.data.config import Bytes, DataConfig, TextFiles, TokenizerFile
from recurjax.experiment import Experiment, read_experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text
from recurjax.files.metric_rows import read_rows
from recurjax.machine import process_group
from recurjax.model import ModelConfig, count_parameters
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.loop import train
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.training.run import RunDirectory
from recurjax.training.spikes import Diverged


class Reached(NamedTuple):
    """The results of a run that finished or diverged.

    Attributes:
      name: name of the experiment, whatever the seed.
      seed: seed of the init and of the order of the rows.
      parameters: in all.
      tokens: trained on.
      flops: training FLOPs, as the model counts them.
      loss: validation, in nats per token; None: the run diverged.
      bits_per_byte: validation; None likewise, and of a task's symbols.
      tokens_per_second: training rate, without compilation and evaluations.
      diverged: whether the run ended so, see `Diverged`.
    """

    name: str
    seed: int
    parameters: int
    tokens: int
    flops: float
    loss: float | None
    bits_per_byte: float | None
    tokens_per_second: float
    diverged: bool = False


def seeded(experiment: Experiment, seed: int) -> Experiment:
    """Returns the experiment with another seed of its init and of its rows' order.

    Seed 0 is the unchanged experiment; another seed becomes part of the name, which is
    the run's directory.
    """
    if seed == 0:
        return experiment
    return replace(
        experiment,
        name=f"{experiment.name}_seed{seed}",
        training=replace(experiment.training, seed=seed),
        data=replace(experiment.data, seed=seed),
    )


def shortened(experiment: Experiment, steps: int | None) -> Experiment:
    """Returns a run of `steps` steps, a tenth of them warm-up; None: unchanged."""
    if steps is None:
        return experiment
    schedule = replace(experiment.schedule, warmup_steps=steps // 10)
    training = replace(experiment.training, steps=steps)
    return replace(experiment, schedule=schedule, training=training)


def trained_on_bytes(
    name: str,
    model: ModelConfig,
    *,
    text: Path,
    tokens: int,
    batch: int,
    length: int,
    learning_rate: float,
) -> Experiment:
    """Returns the training of a byte model on a text, as small sets compare them.

    AdamW with a cosine, a twentieth of the steps warm-up, twenty checkpoints and
    evaluations.

    Args:
      name: name of the run.
      model: of 256 symbols.
      text: UTF-8; its last twentieth is for validation.
      tokens: to train on.
      batch: B.
      length: T of a row.
      learning_rate: at its highest.
    """
    steps = tokens // (batch * length)
    often = max(1, steps // 20)
    return Experiment(
        name=name,
        model=model,
        data=DataConfig(
            corpus=TextFiles(patterns=(str(text),)),
            tokenizer=Bytes(bos=False),
            validation_fraction=0.05,
        ),
        optimizer=AdamW(learning_rate=learning_rate, b2=0.99),
        schedule=Cosine(warmup_steps=steps // 20),
        training=TrainingConfig(
            steps=steps,
            batch=batch,
            length=length,
            checkpoint_every=often,
            keep_checkpoints=1,
        ),
        evaluation=EvaluationConfig(every=often, batches=16),
    )


def trained_further(
    start: Path,
    name: str,
    *,
    text: Path,
    tokens: int,
    batch: int,
    length: int,
    learning_rate: float,
) -> Experiment:
    """Returns the training of a run on a text, from its weights.

    AdamW with a cosine to a tenth, a tenth of the steps warm-up, four checkpoints and
    five evaluations.

    Args:
      start: a run directory with its tokenizer, converted or imported.
      name: name of the new run.
      text: UTF-8; its last tenth is for validation.
      tokens: to train on.
      batch: B.
      length: T of a row.
      learning_rate: at its highest.
    """
    steps, run = max(1, tokens // (batch * length)), RunDirectory(start)
    return replace(
        read_experiment(run.config),
        name=name,
        data=DataConfig(
            corpus=TextFiles(patterns=(str(text),)),
            tokenizer=TokenizerFile(path=str(run.tokenizer)),
        ),
        optimizer=AdamW(learning_rate=learning_rate),
        schedule=Cosine(warmup_steps=steps // 10, end=0.1),
        training=TrainingConfig(
            steps=steps,
            batch=batch,
            length=length,
            start_from=str(start),
            log_every=5,
            checkpoint_every=max(1, steps // 4),
            keep_checkpoints=1,
        ),
        evaluation=EvaluationConfig(every=max(1, steps // 5), batches=8),
    )


def sweep(
    experiments: Sequence[Experiment],
    root: Path,
    *,
    console: Console,
    seeds: int = 1,
) -> list[Reached] | None:
    """Trains every experiment in `root/<name>` and writes what they reached.

    Args:
      experiments: with names that differ.
      root: gets results.json and results.md, rewritten after each run.
      console: reports each run as `train` does, and the message of one that diverged.
        The next call tries such a run again, from its last checkpoint.
      seeds: how many runs of each, see `seeded`. The seed changes last, so that a table
        of one seed is complete first.

    Returns:
      One entry per run; None when a run was stopped: the same call continues from
      there.

    Raises:
      UserError: as `train`; a run there has another config.
    """
    reached = []
    # All experiments at seed 0 first, then all at seed 1, ...
    for seed, experiment in product(range(seeds), experiments):
        run = seeded(experiment, seed)
        console.rule(run.name)
        # A run that is there resumes; a finished one is read and not trained again.
        try:
            result = train(run, root / run.name, console=console)
        except Diverged as error:
            # With several processes, this one has already sent its end to the others.
            if process_group.is_leaving():
                raise
            console.print(f"{error}", soft_wrap=True, highlight=False, markup=False)
            outcome = _read_diverged(run, root / run.name)
        else:
            if result.outcome != "finished":
                return None
            outcome = read_reached(run, root / run.name)
        reached.append(outcome._replace(name=experiment.name, seed=seed))
        write_atomic(root / "results.json", _json(reached))
        write_atomic(root / "results.md", markdown(reached))
    return reached


def sweep_and_print(
    experiments: Sequence[Experiment], root: Path, *, seeds: int = 1
) -> int:
    """Runs `sweep`, then prints the table.

    Returns:
      The process's exit status: 0, also when a run diverged, or 130 when one was
      stopped.
    """
    console = Console()
    reached = sweep(experiments, root, console=console, seeds=seeds)
    if reached is None:
        console.print("stopped: the same command goes on from here")
        return 130
    print(markdown(reached), end="")
    return 0


def read_reached(experiment: Experiment, root: Path) -> Reached:
    """Reads what a finished run reached from its metrics.jsonl."""
    rows = read_rows(RunDirectory(root).metrics).rows
    steps = experiment.training.steps
    tokens = steps * experiment.training.tokens_per_step
    # The last step's rows: of a resumed run metrics.jsonl has each step once.
    last = {row["kind"]: row for row in rows if row["step"] == steps}
    return Reached(
        name=experiment.name,
        seed=experiment.training.seed,
        parameters=count_parameters(experiment.model).total,
        tokens=tokens,
        flops=tokens * experiment.flops_per_token,
        loss=last["validation"]["loss"],
        bits_per_byte=last["validation"].get("bits_per_byte"),
        tokens_per_second=last["train"].get("tokens_per_second", 0.0),
    )


def _read_diverged(experiment: Experiment, root: Path) -> Reached:
    """Reads how far a run came that diverged; what it reached counts for nothing."""
    rows = read_rows(RunDirectory(root).metrics).rows
    tokens = max((row["step"] for row in rows), default=0)
    tokens *= experiment.training.tokens_per_step
    return Reached(
        name=experiment.name,
        seed=experiment.training.seed,
        parameters=count_parameters(experiment.model).total,
        tokens=tokens,
        flops=tokens * experiment.flops_per_token,
        loss=None,
        bits_per_byte=None,
        tokens_per_second=0.0,
        diverged=True,
    )


def markdown(reached: Sequence[Reached]) -> str:
    """Returns a Markdown table: a row per name, with the mean and spread over seeds.

    The spread is the highest less the lowest; a single run has none. Diverged runs are
    listed among the seeds but not counted. Where all rows are symbols, which have no
    bytes, the table has losses per token.
    """
    of_text = any(run.bits_per_byte is not None for run in reached)
    unit = "bits per byte" if of_text else "loss"
    figures = {run: run.bits_per_byte if of_text else run.loss for run in reached}
    lines = [
        f"| run | parameters | tokens | TFLOP | validation {unit} | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(run.name for run in reached):
        runs = [run for run in reached if run.name == name]
        known = [figure for run in runs if (figure := figures[run]) is not None]
        mean = f"{statistics.fmean(known):.3f}" if known else ""
        spread = f" ({max(known) - min(known):.3f})" if len(known) > 1 else ""
        # A run that diverged has read less than the others of its name.
        longest = max(runs, key=lambda run: run.tokens)
        lines.append(
            f"| {name} | {longest.parameters:,} | {longest.tokens:,} | "
            f"{longest.flops / 1e12:.3g} | {mean}{spread} | "
            f"{', '.join(_seed_cell(run, figures[run]) for run in runs)} |"
        )
    return "\n".join(lines) + "\n"


def _seed_cell(run: Reached, figure: float | None) -> str:
    if run.diverged:
        return "diverged"
    return "" if figure is None else f"{figure:.3f}"


def last_validation(root: Path) -> dict[str, Any]:
    """Reads the last validation row of a run; of a run without one, nothing."""
    rows = read_rows(RunDirectory(root).metrics).rows
    return next((row for row in reversed(rows) if row["kind"] == "validation"), {})


def tell(
    results: dict[str, list[dict[str, float]]],
    name: str,
    seed: int,
    figures: Mapping[str, float],
) -> None:
    """Adds what a seed reached to its row of a name, for `table_of`."""
    rows = results.setdefault(name, [])
    rows += [{} for _ in range(seed + 1 - len(rows))]
    rows[seed] |= figures


def table_of(what: str, results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Returns a Markdown table: a row per name, mean over seeds (lowest, highest).

    Args:
      what: heads the column of names.
      results: for each name, the results of each seed by the columns' names.
    """
    # Over all seeds of all names: an unfinished set lacks some.
    rows = [row for seeds in results.values() for row in seeds]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [
        f"| {what} | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, seeds in results.items():
        cells = []
        for column in columns:
            values = [row[column] for row in seeds if column in row]
            if not values:
                cells.append("")
                continue
            spread = f" ({min(values):.3f}, {max(values):.3f})" if values[1:] else ""
            cells.append(f"{statistics.fmean(values):.3f}{spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _json(reached: Sequence[Reached]) -> str:
    return json_text([run._asdict() for run in reached], indent=2) + "\n"
