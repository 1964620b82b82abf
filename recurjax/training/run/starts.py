"""With what code each part of a run was made: starts.jsonl, a row a start."""

import json
import os
import subprocess
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

_SECONDS = 10.0


def note_start(file: Path, *, step: int) -> dict[str, Any]:
    """Appends this start to the file and returns its row.

    A row has the time, the step that training begins or resumes at, the commit checked
    out where the command was given and whether files differ from it (null: no git, or
    no repository), the versions of jax and jaxlib, and how many devices of which kind
    in how many processes.
    """
    # Of where the command was given: that is the code that the user works on.
    commit, dirty = git_state(Path.cwd())
    row = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "step": step,
        "commit": commit,
        "dirty": dirty,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }
    with file.open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")
    return row


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Returns the commit checked out in a folder, and whether tracked files differ.

    Files that git does not track do not count: runs are written beside the code.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None, None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit.strip(), None if changed is None else bool(changed.strip())


def _git(folder: Path, *words: str) -> str | None:
    # Nothing is asked, locked or fetched: a training must not wait for its repository.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            env=env,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
