"""Finds the files that a corpus' patterns name."""

import glob
import os
from pathlib import Path

from recurjax.errors import UserError


def matching_files(patterns: tuple[str, ...]) -> list[Path]:
    """Lists the files of all patterns, each once: pattern by pattern, sorted within.

    A pattern is a path or a glob; `**` crosses folders, `~` is the home folder.

    Raises:
      UserError: a pattern matches no file, or a file may not be read.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        if os.path.isfile(path):
            names = [path]
        else:
            matches = glob.glob(path, recursive=True)
            names = [name for name in sorted(matches) if os.path.isfile(name)]
        if not names:
            hint = " (a folder: name the files in it)" if os.path.isdir(path) else ""
            raise UserError(f"no file matches {pattern!r}{hint}")
        found.update((Path(name), None) for name in names)
    for file in found:
        if not os.access(file, os.R_OK):
            raise UserError(f"cannot read {file}: permission denied")
    return list(found)
