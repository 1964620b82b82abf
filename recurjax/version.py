"""The one place that says which version this is; the package's metadata reads it."""

from pathlib import Path

from packaging.version import InvalidVersion, Version

from recurjax.errors import UserError

VERSION = "0.1.0"
REPORTS = "the repository's issues"
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
