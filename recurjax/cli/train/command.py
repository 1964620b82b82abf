"""`recurjax train EXPERIMENT [--field value ...]`: train, or resume."""

import os
from pathlib import Path
from typing import Any

from recurjax.cli.options import override, shows_usage
from recurjax.cli.train import own_text
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.storage import url_of
from recurjax.machine import early_interrupt, host, process_group
from recurjax.machine.distributed import start_processes
from recurjax.run_table import load_experiment

_USAGE = f"""usage: recurjax train EXPERIMENT [--corpus FILES] [--runs DIR] [--field X]

EXPERIMENT is a name that `recurjax experiments` lists, quickstart or
rat:fineweb_4k_rat16, a .py file with a function config(), or FILE.py:NAME for a row of
a file with a table RUNS (FILE.py alone lists the rows). Every field of its config can
be replaced: --training.steps 500 --optimizer.learning-rate 1e-3 (all of them:
recurjax train EXPERIMENT --help). The run is written to DIR/<name>, runs/<name> unless
told otherwise; the same command resumes a run that was stopped.

{own_text.USAGE}"""


def run(argv: list[str]) -> int:
    """Runs the command."""
    if shows_usage(argv, _USAGE):
        return 0
    file = argv[0]
    if file.startswith("-"):
        raise UserError(f"name the experiment file first, then {file}")
    # First of all: what one process is refused from here on, all learn at once.
    start_processes()
    try:
        return _train(file, argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        process_group.leave(error)
        raise


def _train(file: str, options: list[str]) -> int:
    # Own options first: what is left are fields of the experiment.
    runs, options = _take_runs(options)
    prog = f"recurjax train {file}"
    experiment, options = own_text.with_own_text(
        load_experiment(file), options, prog=prog
    )
    experiment = override(experiment, options, prog=prog)
    if experiment.training.deterministic:
        # An XLA flag, which counts only before devices are looked for.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    host.start_cpu_devices(experiment.mesh.least_devices)
    # Imported late: the settings above count only before jax looks for devices.
    from recurjax.training.loop import train

    early_interrupt.stop_if_noted()
    # One slash, whether a path or a URL. No shell expands the ~ of --runs=~/x.
    root = f"{os.path.expanduser(runs) or '.'}/{experiment.name}"
    if (url := url_of(root)) is not None:
        result = _train_in_bucket(experiment, url)
    else:
        result = train(experiment, Path(root))
    if result.outcome == "finished":
        print(f"finished at step {result.step}: {root}")
        return 0
    print(
        f"{result.outcome} at step {result.step}, saved in {root}: run the same "
        "command again to resume"
    )
    return 130 if result.outcome == "interrupted" else 0


def _train_in_bucket(experiment: Experiment, url: str) -> Any:
    import jax

    from recurjax.training.loop import train
    from recurjax.training.run import mirrored

    with mirrored(url) as mirror:
        result = train(experiment, mirror.folder, mirror=mirror)
    # Only now: the block's end sends what came after the last save.
    if jax.process_index() == 0:
        print(mirror.sentence())
    return result


def _take_runs(options: list[str]) -> tuple[str, list[str]]:
    """Takes --runs DIR, which is no field of an experiment, out of the options."""
    for at, word in enumerate(options):
        if word.startswith("--runs="):
            return word.removeprefix("--runs="), options[:at] + options[at + 1 :]
        if word == "--runs":
            if at + 1 == len(options):
                raise UserError("--runs needs a directory")
            return options[at + 1], options[:at] + options[at + 2 :]
    return "runs", options
