"""Imports run one way, and light imports stay light."""

import ast
import subprocess
import sys

import pytest

from tests.source_tree import ROOT, imported_by, modules, tree_of

# What stands in a row may be imported by every row below it, and by nothing above or
# beside it. The longest name that fits a module decides. A new part needs a place here.
ORDER = (
    ("types", "errors", "parameters", "devices", "host"),
    ("layers", "data", "sharding", "distributed", "config_json", "ranges"),
    ("variants",),
    ("model",),
    ("cross_entropy", "training.spikes", "training.muon"),
    ("training.latent_objectives", "training.muon_adamw"),
    (
        "training.config",
        "training.objective",
        "training.optimizer",
        "training.schedule",
    ),
    ("experiment",),
    ("inference", "evaluation"),
    ("training",),
    ("bench", "convert", "plan"),
    ("cli",),
)
# Where the order alone would allow more than the design does.
ONLY = {
    "data": {"errors", "types"},
    "layers": {"errors", "types"},
    "variants": {"layers", "errors", "types"},
    "model": {"variants", "layers", "errors", "types"},
}
KERNELS_MAY_IMPORT = {"jax", "jaxtyping", "jax_triton", "numpy", "triton"}
HEAVY = {"grain", "matplotlib", "tensorflow", "tensorflow_datasets", "torch"}

RANKS = {part: rank for rank, parts in enumerate(ORDER) for part in parts}


def part_of(module: str) -> str:
    name = module.removeprefix("recurjax.")
    fitting = [part for part in RANKS if name == part or name.startswith(part + ".")]
    assert fitting, f"{module} has no place in tests/test_imports.py's ORDER"
    return max(fitting, key=len)


def edges() -> list[tuple[str, str]]:
    """Returns (importer, imported) for every import inside recurjax."""
    known = set(modules())
    return [
        (importer, imported)
        for importer, path in modules().items()
        if importer.startswith("recurjax.")
        for imported in sorted(imported_by(tree_of(path), known))
        if imported.split(".")[0] == "recurjax"
    ]


def violation(importer: str, imported: str) -> str | None:
    if imported == "recurjax":
        return f"{importer} imports the top-level package: import the module itself"
    above, below = part_of(importer), part_of(imported)
    if above == below:
        return None
    if RANKS[above] <= RANKS[below] or below not in ONLY.get(above, RANKS):
        return f"{importer} ({above}) must not import {imported} ({below})"
    return None


def test_imports_inside_recurjax_run_one_way():
    found = [violation(*edge) for edge in edges()]
    assert [line for line in found if line is not None] == []
    assert len(found) > 50  # the walk saw the package


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("recurjax.layers.norm", "recurjax.model"),
        ("recurjax.model", "recurjax.training.loop"),
        ("recurjax.data.config", "recurjax.model"),
        ("recurjax.variants.transformer.block", "recurjax.sharding"),
        ("recurjax.experiment", "recurjax.training.loop"),
        ("recurjax.layers.norm", "recurjax"),
    ],
)
def test_a_step_the_wrong_way_is_seen(importer, imported):
    assert violation(importer, imported) is not None


def test_no_import_runs_in_a_circle():
    graph: dict[str, set[str]] = {}
    for importer, imported in edges():
        graph.setdefault(importer, set()).add(imported)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for imported in sorted(graph.get(module, ())):
                visit(imported, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_kernels_import_jax_and_never_recurjax():
    standard = set(sys.stdlib_module_names)
    for module, path in modules().items():
        if module.split(".")[0] == "pallas_kernels":
            roots = {name.split(".")[0] for name in imported_by(tree_of(path), set())}
            extra = roots - standard - KERNELS_MAY_IMPORT - {"pallas_kernels"}
            assert not extra, f"{module} imports {extra}"


def test_packages_import_neither_tests_nor_experiments_nor_references():
    known = set(modules())
    for module, path in modules().items():
        for name in imported_by(tree_of(path), known):
            assert name.split(".")[0] not in ("tests", "experiments", "notebooks"), (
                f"{module} imports {name}"
            )
            assert not name.endswith(".reference") or "bench" in module, (
                f"{module} imports {name}: references serve tests, docs and bench only"
            )


def test_no_failed_import_is_passed_over():
    for module, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                caught = ast.unparse(node.type)
                silent = all(isinstance(line, ast.Pass) for line in node.body)
                assert not (silent and "Import" in caught), f"{module}:{node.lineno}"


@pytest.mark.parametrize("what", ["recurjax", "models, inference and bench"])
def test_a_light_import_loads_nothing_heavy(what):
    light = ["recurjax", "recurjax.errors"]
    if what != "recurjax":
        light += [
            module
            for module in modules()
            if part_of_light(module) or "bench" in module.split(".")[-1]
        ]
        assert "recurjax.model" in light
    code = f"""
import importlib, sys
for name in {light!r}:
    importlib.import_module(name)
print(sorted({HEAVY!r} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def part_of_light(module: str) -> bool:
    if module in ("recurjax", "pallas_kernels"):
        return False
    if module.startswith("pallas_kernels."):
        return True
    return part_of(module) in ("model", "variants", "layers", "inference")
