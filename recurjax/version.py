"""The version, which the package's metadata reads."""

from pathlib import Path

from packaging.version import InvalidVersion, Version

from recurjax.errors import UserError

VERSION = "0.1.0"
REPOSITORY = ""
"""The address of the public repository, such as https://github.com/OWNER/recurjax; "":
there is none yet. The notebooks install from it, the model card cites it, the launcher
clones it. `python -m tests.notebooks.opening --renew` writes it into the notebooks, and
`tests/notebooks` compares pyproject.toml and CITATION.cff with it."""
REPORTS = f"{REPOSITORY}/issues" if REPOSITORY else "the repository's issues"
"""Where reports of errors and of holes go; SECURITY.md names the same place."""


def refuse_newer(written_by: object, file: Path) -> None:
    """Raises UserError where a file is of a later version than this one.

    Args:
      written_by: the version that the file names; "": it names none, an early one.
      file: for the message.
    """
    try:
        newer = written_by != "" and Version(str(written_by)) > Version(VERSION)
    except InvalidVersion as error:
        raise UserError(f"{file} names no version: {written_by!r}") from error
    if newer:
        raise UserError(
            f"{file} was written by recurjax {written_by}, and this is {VERSION}: "
            f"install recurjax {written_by} or later to read it"
        )
