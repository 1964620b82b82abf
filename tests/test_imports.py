"""Imports run one way, and light imports stay light."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.source_tree import ROOT, imported_by, modules, tree_of

# Every row below a row may import its modules, and nothing above or in it may. The
# longest name that fits a module decides; "objectives" are those in a variant's folder,
# `variants/<paper>/objectives.py`, which call a complete model. A new part needs a
# place here, and CONTRIBUTING.md describes the order.
ORDER = (
    ("types", "errors", "lazy_names"),
    ("version",),
    ("parameters", "ranges", "machine"),
    ("files",),
    ("layers", "data", "sharding", "config_json"),
    ("variants",),
    ("model",),
    ("losses", "exits", "training.spikes", "training.agreement"),
    ("objectives",),
    ("training.config", "training.objective", "training.optimizers"),
    ("experiment",),
    ("run_table",),
    ("inference", "surgery"),
    ("evaluation",),
    ("training",),
    # The harness' own command line opens runs.
    ("convert", "evaluation.harness"),
    ("bench", "notebook", "plan", "serving"),
    ("cli",),
    ("__main__",),
)
# Where the order alone would allow more than the design does.
ONLY = {
    "data": {"errors", "files", "lazy_names", "ranges", "types", "version"},
    "layers": {"errors", "ranges", "types"},
    "variants": {"layers", "errors", "ranges", "types"},
    "model": {"variants", "layers", "errors", "parameters", "ranges", "types"},
}
# What asks a model by protocol imports no variant; converters and benches are of one.
BY_PROTOCOL = {"experiment", "inference", "evaluation", "training", "plan", "cli"}
KERNELS_MAY_IMPORT = {"jax", "jaxtyping", "numpy"}
IN_TRITON = ".triton_kernels"
"""Modules of kernels in Triton's language import triton, and of ours the shared one."""
SHARED_IN_TRITON = "pallas_kernels.triton_kernels"
OURS = ("recurjax", "pallas_kernels", "tests", "experiments")
OPS = "pallas_kernels/*/api.py"
HEAVY = {"grain", "matplotlib", "tensorflow", "tensorflow_datasets", "torch"}

OF_DATA_AND_COMMANDS = {"array_record", "beartype", "grain", "tokenizers", "tyro"}

RANKS = {part: rank for rank, parts in enumerate(ORDER) for part in parts}


def part_of(module: str) -> str:
    name = module.removeprefix("recurjax.")
    if name.startswith("variants.") and name.endswith(".objectives"):
        return "objectives"
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
    knows_variants = above.split(".")[0] not in BY_PROTOCOL
    if (
        RANKS[above] <= RANKS[below]
        or below not in ONLY.get(above, RANKS)
        or (below == "variants" and not knows_variants)
    ):
        return f"{importer} ({above}) must not import {imported} ({below})"
    return None


def test_imports_inside_recurjax_run_one_way():
    matches = [violation(*edge) for edge in edges()]
    assert [line for line in matches if line is not None] == []
    assert len(matches) > 50  # the walk saw the package


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("recurjax.layers.norm", "recurjax.model"),
        ("recurjax.model", "recurjax.training.loop"),
        ("recurjax.data.config", "recurjax.model"),
        ("recurjax.variants.transformer.block", "recurjax.sharding"),
        ("recurjax.experiment", "recurjax.training.loop"),
        ("recurjax.training.session", "recurjax.variants.rat"),
        ("recurjax.training.loop", "recurjax.convert.authors"),
        ("recurjax.evaluation.core", "recurjax.variants.rat.stack"),
        ("recurjax.inference.sampling", "recurjax.training.loop"),
        ("recurjax.surgery.recursive", "recurjax.inference.sampling"),
        ("recurjax.model", "recurjax.surgery.recursive"),
        ("recurjax.variants.rat", "recurjax.variants.rat.objectives"),
        ("recurjax.plan.programs", "recurjax.bench.rat"),
        ("recurjax.layers.norm", "recurjax"),
    ],
)
def test_a_step_the_wrong_way_is_seen(importer, imported):
    assert violation(importer, imported) is not None


def variants_named(tree: ast.Module) -> list[str]:
    """Returns where a module tells by its class which variant it has."""
    theirs = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("recurjax.variants")
        for alias in node.names
    }
    matches = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass")):
                asked: ast.AST = node.args[1]
            case ast.MatchClass() | ast.Compare():
                asked = node
            case _:
                continue
        names = {n.id for n in ast.walk(asked) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(asked) if isinstance(n, ast.Attribute)}
        matches += [f"line {node.lineno}: {name}" for name in sorted(names & theirs)]
    return matches


def test_nothing_above_the_model_tells_variants_by_their_class():
    """Converters and surgery are spared: each of their rooms is of one variant.

    So is the bench of an op, which reads from a run's config what calls its layers make
    of it.
    """
    read, spared = 0, ("convert", "surgery")
    benches = {f"recurjax.bench.{op.parent.name}" for op in ROOT.glob(OPS)}
    assert len(benches) == 4
    for module, path in modules().items():
        if not module.startswith("recurjax.") or part_of(module) in spared:
            continue
        if module in benches:
            continue
        if RANKS[part_of(module)] > RANKS["model"] and part_of(module) != "objectives":
            read += 1
            assert variants_named(tree_of(path)) == [], module
    assert read > 30


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(stack, RatStack)",
        "isinstance(stack, (int, RatStack))",
        "type(stack) is RatStack",
        "match stack:\n    case RatStack(): pass",
    ],
)
def test_a_variant_told_by_its_class_is_seen(line):
    source = f"from recurjax.variants.rat import RatStack\n{line}"
    assert len(variants_named(ast.parse(source))) == 1


def missing(tree: ast.Module) -> list[str]:
    """Returns what a file imports, in functions too, of our code that is not there."""
    matches = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            here = str(node.module)
            matches += [
                f"line {node.lineno}: {here}.{alias.name}"
                for alias in node.names
                if f"{here}.{alias.name}" not in own_files()
                and alias.name not in names_in(here)
            ]
        elif isinstance(node, ast.Import):
            matches += [
                f"line {node.lineno}: {alias.name}"
                for alias in node.names
                if is_ours(alias.name) and alias.name not in own_files()
            ]
    return matches


def is_ours(module: str) -> bool:
    return module.split(".")[0] in OURS


@cache
def own_files() -> dict[str, Path]:
    """Returns dotted name -> file, or folder without an `__init__`, of all our code."""
    result = {}
    for path in (
        path for name in OURS for path in [ROOT / name, *(ROOT / name).rglob("*")]
    ):
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            result.setdefault(".".join(parts), path)
            if path.name == "__init__.py":
                result[".".join(parts[:-1])] = path
    return result


@cache
def names_in(module: str) -> set[str]:
    """Returns what a module binds, or an empty set where it is none."""
    path = own_files().get(module, ROOT)
    if path.is_dir():
        return set()
    bound = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound |= {(name.asname or name.name).split(".")[0] for name in names}
            case ast.Name(id=name, ctx=ast.Store()):
                bound.add(name)
            case ast.Constant(value=str(name)) if "__getattr__" in bound:
                bound.add(name)  # a door whose table names what it opens late
    return bound


def test_what_is_imported_is_there():
    """Imports inside functions too, which are met only when the function runs."""
    result = {
        path.relative_to(ROOT): missing(tree_of(path))
        for path in own_files().values()
        if path.suffix == ".py"
    }
    assert {file: lines for file, lines in result.items() if lines} == {}
    assert len(result) > 500


@pytest.mark.parametrize(
    "line",
    ["import recurjax.nothing", "from recurjax.model import X", "from tests import no"],
)
def test_an_import_of_what_is_not_there_is_seen(line):
    assert len(missing(ast.parse(f"def late():\n    {line}"))) == 1


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
            if module.endswith(IN_TRITON):
                names = imported_by(tree_of(path), set(modules()))
                allowed = {"triton", "triton.language", SHARED_IN_TRITON}
                assert names <= allowed, f"{module} imports {names}"
                continue
            extra = roots - standard - KERNELS_MAY_IMPORT - {"pallas_kernels"}
            assert not extra, f"{module} imports {extra}"


def test_kernels_import_every_package_that_they_may():
    """Or the package is one more to install, for nothing."""
    kernels = [path for name, path in modules().items() if "pallas_kernels" in name]
    names = {name for path in kernels for name in imported_by(tree_of(path), set())}
    assert {name.split(".")[0] for name in names} >= KERNELS_MAY_IMPORT


def test_packages_import_neither_tests_nor_experiments_nor_references():
    known = set(modules())
    for module, path in modules().items():
        for name in imported_by(tree_of(path), known):
            assert name.split(".")[0] not in ("tests", "experiments", "notebooks"), (
                f"{module} imports {name}"
            )
            definition = name.endswith((".reference", ".algorithms"))
            # The paper's algorithms are written with the reference's functions.
            reads = "bench" in module or module.endswith(".algorithms")
            assert not definition or reads, (
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


def test_a_command_imports_no_kernels_of_other_devices():
    code = """
import sys
import recurjax.cli.generate
names = [name.split(".") for name in sys.modules if name.startswith("pallas_kernels.")]
print([n for n in names if len(n) > 2 and n[2] in ("triton", "mosaic_tpu")])
print("jax.experimental.pallas" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert result.stdout.split() == ["[]", "False"], result.stderr


def part_of_light(module: str) -> bool:
    if module in ("recurjax", "pallas_kernels") or module.endswith(IN_TRITON):
        return False
    if module.startswith("pallas_kernels."):
        return True
    return part_of(module) in ("model", "variants", "layers", "inference")


def test_models_configs_benches_and_plans_need_no_packages_of_data_and_commands():
    """An image made for GPUs often has jax, flax, optax and orbax alone."""
    starts = ("recurjax.experiment", "recurjax.model", "recurjax.bench")
    starts += ("recurjax.plan", "recurjax.inference", "pallas_kernels")
    names = sorted(
        name
        for name in modules()
        if name.startswith(starts) and not name.endswith(("bench.data", IN_TRITON))
    )
    code = f"""
import importlib, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(OF_DATA_AND_COMMANDS)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
for name in {names!r}:
    importlib.import_module(name)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
