"""The sdist and the wheel of this tree, built once for all tests that install them."""

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.source_tree import ROOT
from tests.training.compilation import shared_by_workers

PARTS = ("recurjax", "pallas_kernels", "experiments", "pyproject.toml", "setup.py")
PARTS += ("MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md")
PARTS += ("constraints.txt",)
NO_SOURCES = ("__pycache__", "*.so")
BUILD = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


class Built(NamedTuple):
    """Where both are.

    Attributes:
      tools: a folder with setuptools, for further builds.
    """

    sdist: Path
    wheel: Path
    tools: Path


def run(*words, **options):
    """Returns standard output of a command, which must succeed."""
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, (
        f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout


def copy_of_tree(tree: Path) -> None:
    """Copies what a build reads."""
    tree.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part, tree / part, ignore=shutil.ignore_patterns(*NO_SOURCES)
            )
        else:
            shutil.copy(ROOT / part, tree / part)


def built(tmp_path_factory) -> Built:
    """Builds the sdist of a copy of the tree, and the wheel from the sdist."""
    root = shared_by_workers(tmp_path_factory) / "distributions"
    root.mkdir(exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases it
        if not list(root.glob("*.whl")):
            _build(root)
    [sdist], [wheel] = root.glob("*.tar.gz"), root.glob("*.whl")
    return Built(sdist, wheel, root / "tools")


def _build(root: Path) -> None:
    tools, tree = root / "tools", root / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    copy_of_tree(tree)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", tools]
    got = subprocess.run([*pip, "setuptools>=77"], capture_output=True, text=True)
    if got.returncode != 0:
        pytest.skip(f"pip cannot fetch setuptools>=77: {got.stderr.strip()[-200:]}")
    env = {**os.environ, "PYTHONPATH": str(tools)}
    build = (sys.executable, "-c", BUILD)
    run(*build, "build_sdist", root, cwd=tree, env=env)
    [sdist] = root.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(root / "unpacked", filter="data")
    [unpacked] = (root / "unpacked").iterdir()
    run(*build, "build_wheel", root, cwd=unpacked, env=env)
