"""`recurjax plan EXPERIMENT --topology ...`: compile for hardware that is not there."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from recurjax.cli.options import override, parse, shows_usage
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text
from recurjax.machine import terminal
from recurjax.plan.changes import find_changes
from recurjax.plan.compilers import check_compilers
from recurjax.plan.planning import Plan, make_plan
from recurjax.plan.programs import ProgramName
from recurjax.plan.report import plot_roofline, show_changes, show_plan
from recurjax.plan.sweep import candidates, pareto, show_sweep, watch_sweep
from recurjax.plan.topology import Topology, parse_topology
from recurjax.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, check_ranges
from recurjax.run_table import load_experiment
from recurjax.sharding import AXES, MeshConfig

CACHE = Path("runs") / ".plans"
_USAGE = """usage: recurjax plan EXPERIMENT --topology NAME [options] [--field value]

  recurjax plan quickstart --topology h100
  recurjax plan quickstart --topology v5e:2x2 --mesh data=4 --training.batch 256

Compiles a program of an experiment for devices that need not be here. Prints the memory
per device, the step time, what bounds it, collectives and the price.

EXPERIMENT is one that `recurjax experiments` lists, or a file as for `recurjax train`.
NAME is a TPU slice (v5e:16x16, v5p:4x4x4, v6e:2x2, tpu7x:2x2x1), one or more GPUs (l4,
h100, a100:8, b200:8) or cpu. `recurjax plan EXPERIMENT --help` lists the other options.
Fields of the experiment are options as for `recurjax train`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Compiles a program of an experiment for a topology and reports its needs.

    Attributes:
      topology: devices to plan for: v5e:16x16, v5p:4x4x4, v6e:2x2, h100:8, cpu, ...
      mesh: mesh axes, such as data=4,fsdp=64,tensor=1; one may be -1; None: the
        experiment's.
      program: program to compile; tick is one pass of a recursive model's block over
        the slots of an engine with early exits.
      rows: rows of prefill and decode, or slots of a tick; None: 8 per data shard.
      length: tokens of a prompt, of the cache that decode reads, or of a slot; None: as
        in training.
      price: US$ per device-hour; None: the list price, if there is one.
      json: also write all results to this file.
      plot: also draw a roofline into this PNG file.
      sweep: plan training for every mesh that divides, with every remat policy, and
        show the plans that no other beats in memory and speed; ignores --mesh.
      batches: numbers of rows per step that a sweep tries; None: the experiment's.
      memory_limit: GiB per device that a sweep's plans may take; None: all it has.
      workers: compilations that a sweep runs at once; None: one per core.
      cache: folder of earlier results, by the program's hash.
    """

    topology: str
    mesh: str | None = None
    program: ProgramName = "train"
    rows: PositiveInt | None = None
    length: PositiveInt | None = None
    price: NonNegativeFloat | None = None
    json: Path | None = None
    plot: Path | None = None
    sweep: bool = False
    batches: tuple[PositiveInt, ...] | None = None
    memory_limit: PositiveFloat | None = None
    workers: PositiveInt | None = None
    cache: Path = CACHE

    def __post_init__(self):
        check_ranges(self)
        if (self.rows or self.length) and self.program in ("train", "evaluate"):
            raise UserError(
                "--rows and --length are for the programs prefill, decode and "
                "tick: set --training.batch and --training.length instead"
            )
        if self.sweep and self.program != "train":
            raise UserError(
                f"--sweep plans training only, not --program {self.program}: leave "
                "one of them out"
            )
        for name in ("batches", "memory_limit", "workers"):
            if getattr(self, name) is not None and not self.sweep:
                raise UserError(
                    f"--{name.replace('_', '-')} is for --sweep only: add --sweep or "
                    "leave it out"
                )
        if self.batches is not None and not self.batches:
            raise UserError("--batches is empty: name at least one number of rows")
        for name in ("json", "plot"):
            file = getattr(self, name)
            if file is not None and not file.parent.is_dir():
                raise UserError(f"--{name}: there is no directory {file.parent}")


def run(argv: list[str]) -> int:
    """Runs the command."""
    if shows_usage(argv, _USAGE):
        return 0
    if argv[0].startswith("-"):
        raise UserError(
            f"name the experiment before {argv[0]}: recurjax plan EXPERIMENT "
            "--topology NAME"
        )
    # Options of the plan and fields of the experiment come mixed; a dot tells them
    # apart.
    words, fields = _split(argv[1:])
    # Check here: tyro's own error would list all options.
    if not any(word.split("=")[0] in ("--topology", "--help", "-h") for word in words):
        raise UserError(
            "--topology is missing: name the devices to plan for, such as "
            "v5e:16x16 or h100"
        )
    options = parse(PlanOptions, words, prog=f"recurjax plan {argv[0]}")
    topology = parse_topology(options.topology)
    # Before the experiment is loaded: without a compiler nothing can be planned.
    check_compilers(topology)
    experiment = override(
        load_experiment(argv[0]), fields, prog=f"recurjax plan {argv[0]}"
    )
    if options.mesh is not None:
        experiment = replace(experiment, mesh=parse_mesh(options.mesh))

    def plan_of(experiment: Experiment) -> Plan:
        return make_plan(
            experiment,
            topology,
            options.program,
            rows=options.rows,
            length=options.length,
            price=options.price,
            cache=options.cache,
        )

    console = _console()
    if options.sweep:
        return _sweep(options, experiment, topology, console)
    with terminal.shown_elapsed(f"compiling for {topology.name}", console=console):
        plan = plan_of(experiment)
    show_plan(plan, console)
    report = plan.to_json()
    # The changes that are tried remedy only a lack of memory.
    if not plan.fits and _lacks_memory(plan) and options.program == "train":
        # A line that stays: these compilations can take as long as the plan, each.
        console.print("it does not fit: compiling what would help")
        with terminal.shown_elapsed("trying what would help", console=console):
            changes = find_changes(experiment, plan, plan_of)
        show_changes(changes, console)
        report["changes"] = [
            {"option": change.option} | change.plan.to_json() for change in changes
        ]
    if options.json is not None:
        _write(options.json, report)
    if options.plot is not None:
        plot_roofline([(f"{plan.experiment} {plan.program}", plan)], options.plot)
    return 0


def parse_mesh(text: str) -> MeshConfig:
    """Reads data=4,fsdp=64; axes that are not named are 1, data what is left.

    Raises:
      UserError: an unknown axis, or an invalid size.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or not re.fullmatch(r"-1|[1-9]\d*", size):
            raise UserError(
                f"--mesh {text}: write it like data=4,fsdp=64 with axes of "
                f"{', '.join(AXES)} and sizes of at least 1 or -1"
            )
        sizes[axis] = int(size)
    try:
        # -1 somewhere: data is 1. Otherwise data takes the devices that are left.
        return MeshConfig(**{"data": 1 if -1 in sizes.values() else -1, **sizes})
    except ValueError as error:
        raise UserError(f"--mesh {text}: {error}") from error


def _sweep(
    options: PlanOptions, experiment: Experiment, topology: Topology, console: Console
) -> int:
    batches = options.batches or (experiment.training.batch,)
    planned = watch_sweep(
        candidates(experiment, topology, batches),
        topology,
        console,
        workers=options.workers or os.cpu_count() or 1,
        cache=options.cache,
        price=options.price,
    )
    limit = options.memory_limit
    limit = None if limit is None else round(limit * 2**30)
    show_sweep(planned, console, limit=limit)
    # All candidates, with those that do not fit: the table shows only the best.
    if options.json is not None:
        _write(
            options.json,
            [
                {"candidate": candidate.name} | plan.to_json()
                for candidate, plan in planned
            ],
        )
    if options.plot is not None:
        best = pareto(planned, limit=limit)
        plot_roofline(
            [(candidate.name, plan) for candidate, plan in best], options.plot
        )
    return 0


def _lacks_memory(plan: Plan) -> bool:
    # A program that compiles and is too large has no "failed_by".
    return plan.answer.get("failed_by", "memory") == "memory"


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Separates the plan's options from fields of the experiment, which have a dot."""
    plan_words: list[str] = []
    fields: list[str] = []
    current = plan_words
    for word in words:
        if word.startswith("--"):
            # Any other word is a value, and goes where the option before it went.
            current = fields if "." in word.split("=")[0] else plan_words
        current.append(word)
    return plan_words, fields


def _console() -> Console:
    console = Console()
    # In a file or a pipe rich would break the tables at 80 columns.
    return console if console.is_terminal else Console(width=120)


def _write(file: Path, report: object) -> None:
    write_atomic(file, json_text(report, indent=2) + "\n")
