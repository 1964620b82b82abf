"""Plans many meshes, remat policies and batch sizes, and shows the Pareto front."""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.plan.planning import Plan, make_plan
from recurjax.plan.report import gibibytes
from recurjax.plan.topology import Topology

SWEPT_AXES = ("data", "fsdp", "tensor")
"""Axes of the mesh that a sweep varies; others keep the experiment's sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One combination.

    Attributes:
      mesh: sizes of data, fsdp and tensor.
      remat: the stack's policy; None where it has none.
      batch: rows of a step.
      experiment: with all three.
    """

    mesh: tuple[int, int, int]
    remat: str | None
    batch: int
    experiment: Experiment

    @property
    def name(self) -> str:
        """The candidate's name in tables."""
        axes = zip(SWEPT_AXES, self.mesh, strict=True)
        mesh = ",".join(f"{axis}={size}" for axis, size in axes if size > 1) or "one"
        return f"{mesh}  batch {self.batch}" + (
            "" if self.remat is None else f"  remat {self.remat}"
        )


def candidates(
    experiment: Experiment, topology: Topology, batches: Sequence[int]
) -> list[Candidate]:
    """Lists every mesh that divides batch and heads, with every remat policy.

    Args:
      experiment: gives all else.
      topology: the topology whose devices the meshes take, all of them.
      batches: rows of a step.

    Raises:
      UserError: nothing divides.
    """
    candidates = []
    for batch in batches:
        # The parts of an accumulated step must be even.
        parts = experiment.training.accumulation
        if batch % parts:
            continue
        training = replace(experiment.training, batch=batch)
        for mesh in _factorisations(experiment, topology.devices):
            if (batch // parts) % (mesh[0] * mesh[1]):
                continue
            sizes = dict(zip(SWEPT_AXES, mesh, strict=True))
            changed = replace(
                experiment, training=training, mesh=replace(experiment.mesh, **sizes)
            )
            if changed.evaluation_batch % (mesh[0] * mesh[1]):
                continue  # Training would refuse it.
            candidates += [
                Candidate(mesh=mesh, remat=remat, batch=batch, experiment=candidate)
                for remat, candidate in _with_remat(changed)
            ]
    if not candidates:
        raise UserError(
            f"--batches {', '.join(map(str, batches))}: no mesh of "
            f"{topology.devices} devices divides them: name others"
        )
    return candidates


def run_sweep(
    listed: Sequence[Candidate],
    topology: Topology,
    *,
    workers: int,
    cache: Path | None,
    price: float | None = None,
) -> Iterator[tuple[Candidate, Plan]]:
    """Plans the training step of each, as they are done; `workers` at a time.

    Each is compiled in a process of its own, so threads here only wait.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting = {
            pool.submit(
                make_plan, candidate.experiment, topology, cache=cache, price=price
            ): candidate
            for candidate in listed
        }
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            for future in waiting:
                # Those that wait are dropped when the caller stops; those that run end
                # by themselves.
                future.cancel()


def pareto(
    planned: Sequence[tuple[Candidate, Plan]], *, limit: int | None = None
) -> list[tuple[Candidate, Plan]]:
    """Keeps what nothing beats in memory and in tokens/s at once, fastest first.

    Args:
      planned: all of them; those that do not fit are left out.
      limit: bytes on a device that count as fitting; None: what the device has.
    """
    fitting = [
        (candidate, plan)
        for candidate, plan in planned
        if plan.fits and plan.needed is not None
        if limit is None or plan.needed <= limit
    ]
    # From the fastest down, each of which must need less memory than all before it.
    fitting.sort(key=lambda pair: (-(pair[1].tokens_per_second or 0), pair[1].needed))
    frontier: list[tuple[Candidate, Plan]] = []
    least = None
    for candidate, plan in fitting:
        assert plan.needed is not None
        if least is None or plan.needed < least:
            frontier.append((candidate, plan))
            least = plan.needed
    return frontier


def watch_sweep(
    listed: Sequence[Candidate],
    topology: Topology,
    console: Console,
    *,
    workers: int,
    cache: Path | None,
    price: float | None = None,
) -> list[tuple[Candidate, Plan]]:
    """Runs a sweep under a progress bar, a line for each plan where there is none."""
    planned = []
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=len(listed))
        for candidate, plan in run_sweep(
            listed, topology, workers=workers, cache=cache, price=price
        ):
            planned.append((candidate, plan))
            bar.update(task, advance=1)
            if not console.is_terminal:
                done = f"{len(planned)}/{len(listed)}"
                print(f"{done} {candidate.name}: {_fate(plan)}", file=sys.stderr)
    return planned


def show_sweep(
    planned: Sequence[tuple[Candidate, Plan]],
    console: Console,
    *,
    limit: int | None = None,
) -> None:
    """Prints what nothing beats in memory and tokens/s, and counts the rest."""
    best = pareto(planned, limit=limit)
    fitting = sum(plan.fits for _, plan in planned)
    table = Table(
        title=f"{len(best)} of {len(planned)} ({fitting} fit the device)",
        title_justify="left",
    )
    headings = ("mesh, batch, remat", "GiB", "tokens/s", "binds", "MFU", "hours", "US$")
    for heading in headings:
        table.add_column(heading)
    for candidate, plan in best:
        bounds = plan.bounds
        table.add_row(
            candidate.name,
            "" if plan.needed is None else gibibytes(plan.needed),
            _number(plan.tokens_per_second, ",.0f"),
            "" if bounds is None else bounds.binding or "",
            _number(plan.utilisation, ".1%"),
            _number(plan.run_hours, ",.2f"),
            _number(plan.run_cost, ",.0f"),
        )
    console.print(table)
    reasons = {plan.reason for _, plan in planned if not plan.fits and plan.reason}
    if not best and reasons:
        console.print(f"none fits; one reason: {sorted(reasons)[0]}", markup=False)


def _factorisations(
    experiment: Experiment, devices: int
) -> Iterator[tuple[int, int, int]]:
    """Yields (data, fsdp, tensor) whose product is what the other axes leave."""
    # A sweep leaves `stage` and `sequence` as the experiment has them.
    fixed = experiment.mesh.stage * experiment.mesh.sequence
    if fixed < 1 or devices % fixed:
        raise UserError(
            "mesh.stage and mesh.sequence must divide the topology's "
            f"{devices} devices, got {experiment.mesh.stage} and "
            f"{experiment.mesh.sequence}"
        )
    rest = devices // fixed
    width = experiment.model.stack.width
    for tensor in _divisors(rest):
        # A width that does not divide would be replicated, and the axis wasted.
        if width % tensor:
            continue
        for fsdp in _divisors(rest // tensor):
            if width % fsdp == 0:
                yield rest // tensor // fsdp, fsdp, tensor


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _with_remat(experiment: Experiment) -> Iterator[tuple[str | None, Experiment]]:
    model, stack = experiment.model, experiment.model.stack
    if "remat" not in {field.name for field in fields(stack)}:
        yield None, experiment
        return
    for remat in ("nothing", "dots", "block"):
        changed = replace(stack, remat=remat)  # pyright: ignore[reportCallIssue]
        yield remat, replace(experiment, model=replace(model, stack=changed))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _fate(plan: Plan) -> str:
    size = "" if plan.needed is None else f" {gibibytes(plan.needed)} GiB"
    return ("fits" if plan.fits else "does not fit") + size
