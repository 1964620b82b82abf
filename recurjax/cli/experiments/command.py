"""`recurjax experiments [NAME]`: the experiments that come with the package."""

from recurjax.errors import UserError
from recurjax.run_table import (
    find_experiment,
    load_runs,
    shipped_experiments,
    summary_of,
)

_USAGE = """usage: recurjax experiments [NAME]

Lists the experiments that come with recurjax; with the NAME of a table, its runs.
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
        return _show_rows(argv[0])
    files = shipped_experiments()
    # Names are aligned; summaries are the first lines of the files' docstrings.
    width = max(map(len, files))
    for name, file in files.items():
        print(f"{name:<{width}}  {summary_of(file)}")
    return 0


def _show_rows(name: str) -> int:
    file, _ = find_experiment(name)
    if file.name != "runs.py":
        print(f"{name}  {summary_of(file)}")
        return 0
    # Runs of a table are read by running its file, which imports the library.
    for row, run in load_runs(file).items():
        print(f"{name}:{row}  {run.reproduces}: {run.expected}")
    return 0
