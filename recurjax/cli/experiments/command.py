"""`recurjax experiments [NAME]`: the experiments that come with the package."""

from pathlib import Path

from recurjax.errors import UserError
from recurjax.run_table import (
    find_experiment,
    listed_runs,
    load_runs,
    shipped_experiments,
    summary_of,
)

_USAGE = """usage: recurjax experiments [NAME]

Lists the experiments that come with recurjax; with the NAME of a paper, its runs.
`recurjax train NAME` or `recurjax train NAME:RUN` starts one, and
`recurjax new mine --from NAME` copies it into a file to edit."""


def run(argv: list[str]) -> int:
    """Runs the command."""
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        raise UserError(f"recurjax experiments takes one name, got {' '.join(argv)}")
    if argv:
        return _show_runs(argv[0])
    files = shipped_experiments()
    # Names are aligned; summaries are the first lines of the files' docstrings.
    width = max(map(len, files))
    for name, file in files.items():
        print(f"{name:<{width}}  {summary_of(file)}")
        if runs := listed_runs(name):
            print(f"{'':<{width}}  {len(runs)} runs, such as {name}:{runs[0].name}")
    print("\nrecurjax experiments NAME lists runs; recurjax train NAME:RUN starts one")
    return 0


def _show_runs(name: str) -> int:
    file, _ = find_experiment(name)
    if runs := listed_runs(name):
        print(f"{summary_of(file)}\n")
        width = max(len(run.name) for run in runs)
        for run in runs:
            size = f"{run.parameters} parameters, {run.tokens} tokens"
            what = f"{run.reproduces}: {run.expected}"
            print(f"{name}:{run.name:<{width}}  {what}  ({size})")
        return 0
    return _show_rows_of(file, name)


def _show_rows_of(file: Path, name: str) -> int:
    if file.name != "runs.py":
        print(f"{name}  {summary_of(file)}")
        return 0
    # A user's own table is in no README: its file is run, which imports the library.
    for row, run in load_runs(file).items():
        print(f"{name}:{row}  {run.reproduces}: {run.expected}")
    return 0
