"""The packages' own source, as syntax trees, and the documents."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("recurjax", "pallas_kernels")
FOLDERS = ("docs", "experiments", "notebooks", "pallas_kernels", "recurjax", "tests")
"""Those with prose: documents, docstrings and comments."""


def documents() -> list[Path]:
    """Returns all Markdown files, those of the root first."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")]
    return [*sorted(ROOT.glob("*.md")), *sorted(inside)]


@cache
def modules() -> dict[str, Path]:
    """Returns dotted name -> file of every module of both packages."""
    files = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            *parents, last = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parents if last == "__init__" else [*parents, last])
            files[name] = path
    return files


@cache
def tree_of(path: Path) -> ast.Module:
    """Parses one file."""
    return ast.parse(path.read_text(), filename=str(path))


def imported_by(tree: ast.Module, known: set[str]) -> set[str]:
    """Returns the names that a file imports anywhere, functions included.

    `from package import name` counts as package.name when that is one of the `known`
    modules, and as package otherwise.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in known else str(node.module))
    return names
