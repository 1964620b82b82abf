"""Writes the tables of experiments/README.md from the tables of runs.

A row per run of a paper: what it reproduces, the figure expected, and what it costs:
parameters and tokens, the FLOPs of training that the model itself counts, and the hours
of one H100 at the bound of a plan, from planned_hours.json. Of the small tasks, whose
runs differ in the mixer, a row per task. Runs nothing; the count of parameters takes
about half a minute.

    python experiments/table_of_runs.py
    python experiments/table_of_runs.py --plan rat recurrent_transformer

`--plan` first plans what is not planned yet: it compiles each run's training step for
h100:8, rows spread over the eight (where that does not fit, weights too, then in parts
of the step's rows, one after another), and multiplies the least time that a step can
take by its steps and devices. Runs of one step are planned once: those that differ in
their number of steps, schedule or start alone. `recurjax plan` says more of any one
run, and a real one takes longer. Runs that read a prepared corpus are planned, a minute
or two each on one core. Needs the compilers (`recurjax compilers`). A stopped command
continues after the last plan.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recurjax.cli.options import parse, run_script
from recurjax.data.config import DataConfig, Prepared, PromptAnswer
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text, read_json
from recurjax.machine import host
from recurjax.model import count_parameters
from recurjax.plan.compilers import check_compilers
from recurjax.plan.planning import Plan, make_plan
from recurjax.plan.topology import parse_topology
from recurjax.run_table import Run, load_experiment, load_runs
from recurjax.sharding import MeshConfig

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
RECORD = FOLDER / "planned_hours.json"
TABLES = (
    *("recurrent_transformer", "rat", "latent_recurrent_transformer"),
    *("relaxed_recursive_transformer", "recurformer"),
)
TASKS = "tasks"
TOPOLOGY = "h100:8"
DATA, FSDP = MeshConfig(data=8), MeshConfig(fsdp=8)
WAYS = ((DATA, 1), (FSDP, 1), (FSDP, 2), (FSDP, 4), (FSDP, 8))
"""Meshes and accumulations, in the order in which a run is tried on them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Writes the tables; plans runs first on request.

    Attributes:
      plan: papers whose runs are planned first.
      cache: a folder of earlier plans, found by the program's hash.
    """

    plan: tuple[str, ...] = ()
    cache: Path = Path("runs/.plans")

    def __post_init__(self):
        for paper in self.plan:
            if paper not in TABLES:
                raise UserError(
                    f"--plan must be one of {', '.join(TABLES)}, got {paper}"
                )


def table(paper: str) -> str:
    """Returns the Markdown table of a paper's runs."""
    file = FOLDER / paper / "runs.py"
    lines = [
        "| run | reproduces | expected | needs | parameters | tokens | FLOPs | hours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in load_runs(file).items():
        experiment = load_experiment(f"{file}:{name}")
        lines.append(named(name, run) + costs(experiment, f"{paper}/{name}"))
    return "\n".join(lines) + "\n"


def table_of_tasks() -> str:
    """Returns the Markdown table of the small tasks, by their runs with attention."""
    file, suffix = FOLDER / TASKS / "runs.py", "_attention"
    lines = [
        "| task | tokens of a row | rows of a step | parameters | tokens | FLOPs |",
        "|---|---|---|---|---|---|",
    ]
    for name in load_runs(file):
        if not name.endswith(suffix) or name.endswith(f"_mamba{suffix}"):
            continue
        run = load_experiment(f"{file}:{name}")
        training = run.training
        cells = (
            f"`{name.removesuffix(suffix)}`",
            training.length,
            training.batch,
            *sizes(run),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def named(name: str, run: Run) -> str:
    """Returns the cells that are known without making the experiment."""
    return f"| `{name}` | {run.reproduces} | {run.expected} |"


def costs(experiment: Experiment, key: str) -> str:
    """Returns the other cells of a row; `key`: paper/run."""
    data = experiment.data
    corpus = data.corpus if isinstance(data, DataConfig) else None
    needs = "nothing"
    if isinstance(corpus, Prepared):
        needs = f"`{corpus.directory}`"
    elif isinstance(corpus, PromptAnswer):
        needs = " ".join(f"`{pattern}`" for pattern in corpus.patterns)
    hours = hours_cell(experiment, read_record().get(key))
    return " " + " | ".join((needs, *sizes(experiment), hours)) + " |"


def sizes(experiment: Experiment) -> tuple[str, str, str]:
    """Returns the cells of the model's parameters, and the training's tokens, FLOPs."""
    training = experiment.training
    tokens = training.steps * training.tokens_per_step
    parameters = count_parameters(experiment.model).total
    return _short(parameters), _short(tokens), f"{training_flops(experiment):.1e}"


def filled(text: str, paper: str, rows: str) -> str:
    """Returns the README with a paper's table in its place.

    Raises:
      ValueError: the README has no place for it.
    """
    start, end = f"<!-- {paper}/runs.py -->\n", "<!-- end -->"
    pattern = re.compile(f"(?<={re.escape(start)}).*?(?={re.escape(end)})", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"README.md has no {start.strip()} ... {end}")
    return pattern.sub(lambda _: rows, text, count=1)


def planned_runs(paper: str) -> Iterator[tuple[str, Experiment]]:
    """Yields (name, experiment) of each run of a paper that reads a prepared corpus."""
    file = FOLDER / paper / "runs.py"
    for name in load_runs(file):
        run = load_experiment(f"{file}:{name}")
        if isinstance(run.data, DataConfig) and isinstance(run.data.corpus, Prepared):
            yield name, run


def training_flops(experiment: Experiment) -> float:
    """Returns the FLOPs of the full training, as the model counts them."""
    training = experiment.training
    return training.steps * training.tokens_per_step * experiment.flops_per_token


def hours_cell(experiment: Experiment, entry: dict[str, Any] | None) -> str:
    """Returns the hours that were recorded of a run; "-": of a run that cost else."""
    if entry is None or entry["flops"] != training_flops(experiment):
        return "-"
    hours = entry["hours"]
    return "does not fit" if hours is None else f"{hours:.3g}"


def read_record() -> dict[str, dict[str, Any]]:
    """Reads what is planned already, by paper/run."""
    return read_json(RECORD, "the record of planned runs") if RECORD.exists() else {}


def plan_run(experiment: Experiment, cache: Path) -> Plan:
    """Plans a run the first way that it fits; the last where it fits none."""
    topology = parse_topology(TOPOLOGY)
    training = experiment.training
    for mesh, parts in WAYS:
        in_parts = replace(training, accumulation=parts * training.accumulation)
        planned = replace(experiment, mesh=mesh, training=in_parts)
        plan = make_plan(planned, topology, cache=cache)
        if plan.fits:
            break
    return plan


def entry(experiment: Experiment, plan: Plan) -> dict[str, Any]:
    """Returns what is recorded of a plan; no hours where nothing fits."""
    hours = plan.run_hours if plan.fits else None
    return {
        "flops": training_flops(experiment),
        "hours": None if hours is None else hours * plan.topology.devices,
        "binding": None if plan.bounds is None else plan.bounds.binding,
        "mesh": {axis: size for axis, size in plan.mesh.items() if size > 1},
    }


def entry_of_same_step(
    experiment: Experiment, paper: str, record: dict[str, dict[str, Any]]
) -> dict[str, Any] | None:
    """Returns the entry of a planned run of the same step, at this one's length."""
    for name, run in planned_runs(paper):
        known = record.get(f"{paper}/{name}")
        if known is None or known["flops"] != training_flops(run):
            continue
        steps, start = experiment.training.steps, experiment.training.start_from
        training = replace(run.training, steps=steps, start_from=start)
        same = replace(
            run,
            name=experiment.name,
            training=training,
            schedule=experiment.schedule,
        )
        if same == experiment:
            hours, ratio = known["hours"], steps / run.training.steps
            hours = None if hours is None else hours * ratio
            return known | {"flops": training_flops(experiment), "hours": hours}
    return None


def plan_runs(papers: tuple[str, ...], cache: Path) -> None:
    """Plans run by run what is not planned yet and writes the record after each."""
    check_compilers(parse_topology(TOPOLOGY))
    for paper in papers:
        for name, run in planned_runs(paper):
            key, record = f"{paper}/{name}", read_record()
            if key in record and record[key]["flops"] == training_flops(run):
                continue
            try:
                record[key] = entry_of_same_step(run, paper, record) or entry(
                    run, plan_run(run, cache)
                )
            except UserError as error:
                print(f"{key}: {error}", flush=True)
                continue
            print(f"{key}: {record[key]}", flush=True)
            write_atomic(RECORD, json_text(record, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Rewrites the file."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="table_of_runs.py")
    if options.plan:
        plan_runs(options.plan, options.cache)
    text = README.read_text()
    for paper in TABLES:
        text = filled(text, paper, table(paper))
    text = filled(text, TASKS, table_of_tasks())
    write_atomic(README, text)
    return 0


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)


if __name__ == "__main__":
    host.prepare()
    run_script(main)
