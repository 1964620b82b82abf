"""The badge and the first code cell of every notebook, from the repository's address.

`python -m tests.notebooks.opening --renew` writes them into notebooks/*.ipynb.
"""

import json
import sys
from typing import Any

from recurjax.version import REPOSITORY
from tests.source_tree import ROOT

FOLDER = ROOT / "notebooks"
INSTALL = """\
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which

REPOSITORY = "{address}"  # recurjax.version.REPOSITORY; empty: no public address yet
if getattr(find_spec("recurjax"), "origin", None) is None:  # a folder alone has none
    folders = Path("recurjax").resolve(), Path("..").resolve()
    clones = [path.as_uri() for path in folders if (path / "pallas_kernels").is_dir()]
    source = clones[0] if clones else REPOSITORY and f"git+{REPOSITORY}"
    extra = "[cuda]" if which("nvidia-smi") else "[tpu]" if find_spec("libtpu") else ""
    pip = [sys.executable, "-m", "pip", "install", "-q", f"recurjax{extra} @ {source}"]
    if not source or subprocess.run(pip).returncode:
        raise RuntimeError(
            f"recurjax is not installed, and {source or 'a clone'} could not be: put a "
            "clone of it next to this notebook, as the folder recurjax, check that "
            f"Python {sys.version.split()[0]} is at least 3.11, run this cell again"
        )"""
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"


def install_cell(address: str) -> str:
    """Returns the cell that installs recurjax where it is missing."""
    return INSTALL.replace("{address}", address)


def badge(name: str, address: str) -> str | None:
    """Returns the link that opens a notebook in Colab; None without an address."""
    owner = address.removeprefix("https://github.com/")
    if not address or owner == address:
        return None
    page = (
        f"https://colab.research.google.com/github/{owner}/blob/main/notebooks/{name}"
    )
    return f"{BADGE}({page})"


def opened(name: str, notebook: dict[str, Any], address: str) -> dict[str, Any]:
    """Returns the notebook with its badge and its first code cell."""
    welcome, install, *others = notebook["cells"]
    lines = [x for x in welcome["source"] if not x.startswith(BADGE)]
    link = badge(name, address)
    # Under the title, which is the first line.
    lines[1:1] = [] if link is None else [f"{link}\n"]
    install_lines = install_cell(address).splitlines(keepends=True)
    cells = [{**welcome, "source": lines}, {**install, "source": install_lines}]
    return {**notebook, "cells": [*cells, *others]}


def main() -> None:
    """Writes all notebooks."""
    if sys.argv[1:] != ["--renew"]:
        sys.exit("usage: python -m tests.notebooks.opening --renew")
    for file in FOLDER.glob("*.ipynb"):
        notebook = opened(file.name, json.loads(file.read_text()), REPOSITORY)
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        file.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
