"""A sweep as it runs, and its table."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from recurjax.plan.planning import Plan
from recurjax.plan.report import gibibytes
from recurjax.plan.sweep import Candidate, pareto, run_sweep
from recurjax.plan.topology import Topology


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
        for one, plan in run_sweep(
            listed, topology, workers=workers, cache=cache, price=price
        ):
            planned.append((one, plan))
            bar.update(task, advance=1)
            if not console.is_terminal:
                done = f"{len(planned)}/{len(listed)}"
                print(f"{done} {one.name}: {_fate(plan)}", file=sys.stderr)
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
    for one, plan in best:
        bounds = plan.bounds
        table.add_row(
            one.name,
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


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _fate(plan: Plan) -> str:
    size = "" if plan.needed is None else f" {gibibytes(plan.needed)} GiB"
    return ("fits" if plan.fits else "does not fit") + size
