import ast
import json
import re
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
LIMIT_SECONDS = 1800
"""Ends a kernel that hangs, however busy the machine is."""
KERNEL = "this-interpreter"

PROMISED = {
    "first_tour.ipynb": {"pictures": 2, "comparisons": 2},
    "recurrent_transformer.ipynb": {"pictures": 3, "comparisons": 4},
    "rat.ipynb": {"pictures": 3, "comparisons": 2},
    "latent_recurrent_transformer.ipynb": {"pictures": 3, "comparisons": 6},
    "recurformer.ipynb": {"pictures": 3, "comparisons": 3},
    "relaxed_recursive_transformer.ipynb": {"pictures": 3, "comparisons": 3},
}

NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> str:
    """Names a kernel of the running interpreter; nothing of it touches the home."""
    folder = tmp_path / "kernels" / KERNEL
    folder.mkdir(parents=True)
    start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": start, "display_name": KERNEL, "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    for variable in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return KERNEL


@pytest.mark.slow
@every_notebook
def test_a_notebook_runs_quietly_to_its_end_and_shows_what_it_promises(name, kernel):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    deadline = time.monotonic() + LIMIT_SECONDS
    NotebookClient(
        notebook,
        kernel_name=kernel,
        resources={"metadata": {"path": str(FOLDER)}},
        timeout_func=lambda cell: max(1, deadline - time.monotonic()),
    ).execute()
    outputs = [output for cell in _code(notebook) for output in cell.outputs]
    streams = [output for output in outputs if output.output_type == "stream"]
    text = "".join(output.text for output in streams)
    assert not [output.text for output in streams if output.name == "stderr"]

    [(first, last)] = re.findall(r"loss fell from (\S+) to (\S+)", text)
    assert float(last) < float(first) - 1, text
    pictures = [output.data["image/png"] for output in outputs if "data" in output]
    assert len(pictures) == PROMISED[name]["pictures"]
    assert min(map(len, pictures)) > 10_000, "a picture is all but empty"
    differences = re.findall(r"differs from .* by at most (\S+)", text)
    assert len(differences) == PROMISED[name]["comparisons"], text
    assert max(map(float, differences), default=0) < 1e-4, text


@every_notebook
def test_what_a_notebook_imports_is_there(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    source = "\n".join(
        TransformerManager().transform_cell(cell.source) for cell in _code(notebook)
    )
    imports = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("recurjax")
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
