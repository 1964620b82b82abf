"""Notebooks run from the installed wheel in an empty folder and keep their promises."""

import ast
import fcntl
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

from recurjax.version import REPOSITORY
from tests.compiling import QUICK_COMPILE
from tests.notebooks.opening import FOLDER, install_cell, opened
from tests.packaging.wheel import built, copy_of_tree
from tests.source_tree import ROOT
from tests.training.compilation import shared_by_workers

LIMIT_SECONDS = 1800
"""Ends a kernel that hangs, however busy the machine is."""
LONGEST_CELL = 20
KERNEL = "this-interpreter"

PROMISED = {
    "first_tour.ipynb": {"pictures": 2, "comparisons": 2},
    "compare_variants.ipynb": {"pictures": 2, "comparisons": 0},
    "pretrained_and_back.ipynb": {"pictures": 2, "comparisons": 2},
    "recurrent_transformer.ipynb": {"pictures": 3, "comparisons": 4},
    "rat.ipynb": {"pictures": 3, "comparisons": 2},
    "latent_recurrent_transformer.ipynb": {"pictures": 3, "comparisons": 6},
    "recurformer.ipynb": {"pictures": 3, "comparisons": 3},
    "relaxed_recursive_transformer.ipynb": {"pictures": 3, "comparisons": 3},
}
SHORTER = {
    "first_tour.ipynb": {"steps=100,": "steps=50,"},
    "compare_variants.ipynb": {"steps=100,": "steps=20,"},
    "pretrained_and_back.ipynb": {"60 if config": "40 if config"},
    "recurrent_transformer.ipynb": {", 64, 500": ", 64, 200"},
    "rat.ipynb": {"steps=150,": "steps=50,"},
    "latent_recurrent_transformer.ipynb": {", 8, 150": ", 8, 50"},
    "recurformer.ipynb": {
        "steps=200,": "steps=60,",
        "steps=100, rate": "steps=30, rate",
    },
    "relaxed_recursive_transformer.ipynb": {
        "steps=150,": "steps=60,",
        "steps=100,": "steps=30,",
    },
}
"""What the test trains less than a reader does, as text that each notebook has once."""
KERNEL_OPTIONS = QUICK_COMPILE | {"xla_backend_optimization_level": 1}
"""Compiles in half the time. Level 0 compiles faster and runs three times slower, which
a hundred training steps do not make up for."""

NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("name", NAMES)
QUICK = {"first_tour.ipynb"}
"""What `make test-slow` runs: the rest takes six minutes."""


@pytest.fixture
def kernel(tmp_path, tmp_path_factory, monkeypatch) -> str:
    """Names a kernel whose settings and caches are in temporary folders.

    The notebooks share their compiled programs.
    """
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    for variable in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cache = shared_by_workers(tmp_path_factory) / "of_notebooks"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    options = KERNEL_OPTIONS.items()
    flags = [f"--{name}={str(value).lower()}" for name, value in options]
    earlier = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", " ".join([earlier, *flags]).strip())
    # The Hub is out of reach: what a notebook does then is what is tested.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("RECURJAX_CACHE", str(tmp_path / "cache"))
    return write_kernel(tmp_path, sys.executable)


def write_kernel(root: Path, python: str | Path) -> str:
    """Writes the specification of a kernel under `JUPYTER_PATH`."""
    folder = root / "kernels" / KERNEL
    folder.mkdir(parents=True)
    start = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": start, "display_name": KERNEL, "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    return KERNEL


@pytest.fixture
def installed(tmp_path_factory, monkeypatch) -> Path:
    """Unpacks the wheel into a folder that comes before the suite's own packages."""
    site = shared_by_workers(tmp_path_factory) / "site"
    wheel = built(tmp_path_factory).wheel
    with wheel.with_name("lock_of_site").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases it
        if not site.exists():
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    return site


def execute(notebook, kernel: str, folder: Path) -> None:
    """Runs a notebook's cells in a folder, which must be empty at first."""
    deadline = time.monotonic() + LIMIT_SECONDS
    NotebookClient(
        notebook,
        kernel_name=kernel,
        resources={"metadata": {"path": str(folder)}},
        timeout_func=lambda cell: max(1, deadline - time.monotonic()),
    ).execute()


def shortened(name: str):
    """Reads a notebook that trains for fewer steps, and says where recurjax is."""
    text = (FOLDER / name).read_text()
    for steps, fewer in SHORTER[name].items():
        assert text.count(steps) == 1, f"{name} has {steps!r} {text.count(steps)} times"
        text = text.replace(steps, fewer)
    notebook = nbformat.reads(text, as_version=4)
    where = nbformat.v4.new_code_cell("import recurjax\nrecurjax.__file__")
    return nbformat.from_dict({**notebook, "cells": [*notebook.cells, where]})


def streams_of(notebook) -> list:
    outputs = [output for cell in _code(notebook) for output in cell.outputs]
    return [output for output in outputs if output.output_type == "stream"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, "slow" if name in QUICK else "sweep"))
        for name in NAMES
    ],
)
def test_a_notebook_runs_quietly_to_its_end_and_shows_what_it_promises(
    name, kernel, installed, tmp_path
):
    notebook, empty = shortened(name), tmp_path / "empty"
    empty.mkdir()
    execute(notebook, kernel, empty)
    *cells, where = _code(notebook)
    assert str(installed) in where.outputs[0].data["text/plain"]
    streams = streams_of(notebook)
    text = "".join(output.text for output in streams)
    assert not [output.text for output in streams if output.name == "stderr"]

    falls = re.findall(r"loss fell from (\S+) to (\S+)", text)
    drops = [float(first) - float(last) for first, last in falls]
    assert drops and min(drops) > 0 and drops[0] > 1, text
    outputs = [output for cell in cells for output in cell.outputs]
    pictures = [output.data["image/png"] for output in outputs if "data" in output]
    assert len(pictures) == PROMISED[name]["pictures"]
    assert min(map(len, pictures)) > 10_000, "a picture is all but empty"
    differences = re.findall(r"differs from .* by at most (\S+)", text)
    assert len(differences) == PROMISED[name]["comparisons"], text
    assert max(map(float, differences), default=0) < 1e-4, text


@pytest.mark.sweep
def test_the_first_cells_install_a_clone_on_a_bare_colab(
    kernel, tmp_path, tmp_path_factory, monkeypatch
):
    """The environment has the dependencies, a fake google.colab and no recurjax."""
    content, environment = tmp_path / "content", tmp_path / "environment"
    content.mkdir()
    copy_of_tree(content / "recurjax")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", environment], check=True
    )
    # A line of a .pth adds a folder and reads none of the .pth files in it, so that the
    # suite's own editable recurjax stays out.
    [site] = (environment / "lib").glob("python*/site-packages")
    dependencies = Path(nbformat.__file__).parents[1]
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    (site / "google" / "colab").mkdir(parents=True)
    for module in ("__init__", "output"):  # jax imports the second one there
        (site / "google" / "colab" / f"{module}.py").touch()
    # Nothing is fetched: the suite has the dependencies, and setuptools.
    monkeypatch.setenv("PIP_NO_DEPS", "1")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's word for "no isolation"
    monkeypatch.setenv("PYTHONPATH", str(built(tmp_path_factory).tools))
    kernel_file = tmp_path / "kernels" / KERNEL / "kernel.json"
    python = str(environment / "bin" / "python")
    kernel_file.write_text(kernel_file.read_text().replace(sys.executable, python))

    notebook = nbformat.read(FOLDER / "first_tour.ipynb", as_version=4)
    fake = nbformat.v4.new_code_cell("import google.colab")
    where = nbformat.v4.new_code_cell("print(recurjax.__file__)")
    # The cell that installs, and the one that imports.
    notebook.cells = [fake, *_code(notebook)[:2], where]
    execute(notebook, kernel, content)
    assert str(site) in streams_of(notebook)[-1].text


@pytest.mark.parametrize("has_clone", [False, True], ids=["nothing", "pip_fails"])
def test_an_installation_that_fails_is_one_clear_sentence(
    has_clone, tmp_path, monkeypatch
):
    if has_clone:
        (tmp_path / "recurjax" / "pallas_kernels").mkdir(parents=True)
    commands = []

    def fail(command):
        commands.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", fail)
    with pytest.raises(RuntimeError, match="recurjax is not installed") as failure:
        exec(install_cell(""), {})
    assert "put a clone of it next to this notebook" in str(failure.value)
    assert len(commands) == has_clone
    if commands:
        assert commands[0][-1] == f"recurjax @ {(tmp_path / 'recurjax').as_uri()}"


def test_the_address_of_the_repository_is_one_constant():
    for name in NAMES:
        notebook = json.loads((FOLDER / name).read_text())
        message = "run python -m tests.notebooks.opening --renew"
        assert opened(name, notebook, REPOSITORY) == notebook, message
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"].get("Repository", "") == REPOSITORY
    citation = (ROOT / "CITATION.cff").read_text()
    cited = re.findall(r"^repository-code: \"?([^\"\n]*)", citation, re.MULTILINE)
    assert cited == ([REPOSITORY] if REPOSITORY else [])


def test_an_address_becomes_a_badge_and_the_place_to_install_from():
    address = "https://github.com/OWNER/recurjax"
    notebook = json.loads((FOLDER / "rat.ipynb").read_text())
    welcome, install = opened("rat.ipynb", notebook, address)["cells"][:2]
    assert f"{address.removeprefix('https://')}/blob/main/notebooks/rat.ipynb" in (
        "".join(welcome["source"]).replace(
            "colab.research.google.com/github", "github.com"
        )
    )
    assert f'REPOSITORY = "{address}"' in "".join(install["source"])
    again = opened("rat.ipynb", opened("rat.ipynb", notebook, address), "")
    assert again == opened("rat.ipynb", notebook, "")


@every_notebook
def test_no_cell_is_long(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    lines = {cell.id: len(cell.source.splitlines()) for cell in _code(notebook)}
    assert {cell: n for cell, n in lines.items() if n > LONGEST_CELL} == {}


@every_notebook
def test_what_a_notebook_imports_is_there(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    source = "\n".join(
        TransformerManager().transform_cell(cell.source) for cell in _code(notebook)
    )
    imports = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("recurjax")
        for alias in node.names
    ]
    missing = [
        f"{module}.{attribute}"
        for module, attribute in imports
        if not hasattr(import_module(module), attribute)
        and find_spec(f"{module}.{attribute}") is None
    ]
    assert imports and not missing


@every_notebook
def test_a_notebook_is_saved_without_outputs(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    kept = [
        cell.id
        for cell in _code(notebook)
        if cell.outputs or cell.execution_count is not None or cell.metadata
    ]
    assert not kept, f"clear all outputs of {name} before saving it"
    assert set(notebook.metadata) <= {"colab", "kernelspec", "language_info"}


@every_notebook
def test_a_notebook_imports_and_defines_no_class_or_function(name):
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for cell in _code(nbformat.read(FOLDER / name, as_version=4)):
        source = TransformerManager().transform_cell(cell.source)
        for node in ast.walk(ast.parse(source)):
            named = isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)
            assert not named and not isinstance(node, definitions), (
                f"{name}, cell {cell.id}, line {node.lineno}: move it into the package"
            )


def _code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]
