"""The site: every link has a target, every public name a line, and it builds."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.source_tree import ROOT, documents, modules, tree_of

TWINS = "recurjax.convert.torch.modules."
"""PyTorch's templates, whose methods are PyTorch's and transformers' interfaces."""
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")


def dead_links(document: Path, text: str) -> list[str]:
    """Returns the links of a document to files that are not there; code is no link."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```$|`[^`\n]*`", "", text)
    return [
        f"{document.name}: {target}"
        for target in LINK.findall(prose)
        if not (document.parent / target).exists()
    ]


def test_every_link_between_documents_has_a_target():
    dead = [line for path in documents() for line in dead_links(path, path.read_text())]
    assert dead == []


def test_the_readme_stays_short():
    # Comments, such as the marks of tests/documents, are no text.
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text())
    assert len(text.split()) <= 900


def test_a_dead_link_is_seen():
    readme = ROOT / "README.md"
    text = "[a](docs/pods.md#x) [b](docs/none.md) `[c](d)` [e](https://f)"
    assert dead_links(readme, text) == ["README.md: docs/none.md"]


def public_classes(tree: ast.Module) -> list[ast.ClassDef]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node for node in classes if not node.name.startswith("_")]


def methods(kind: ast.ClassDef) -> list[ast.FunctionDef]:
    functions = [node for node in kind.body if isinstance(node, ast.FunctionDef)]
    return [node for node in functions if not node.name.startswith("_")]


def undocumented(trees: dict[str, ast.Module]) -> list[str]:
    """Returns public functions, classes and methods without a docstring.

    A method may have it in another class, since an interface is documented once, and
    a property may be among its class's `Attributes`.
    """
    classes = {
        (name, k.name): k for name, t in trees.items() for k in public_classes(t)
    }
    described = {
        method.name
        for kind in classes.values()
        for method in methods(kind)
        if ast.get_docstring(method)
    }
    lacking = [
        f"{module}.{kind}.{method.name}"
        for (module, kind), node in classes.items()
        for method in methods(node)
        if method.name not in described
        and not ast.get_docstring(method)
        and not re.search(rf"\b{method.name}\b", ast.get_docstring(node) or "")
    ]
    for module, tree in trees.items():
        described_here = {
            node.name: node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }  # of overloads the last, which has the body
        lacking += [
            f"{module}.{name}"
            for name, node in described_here.items()
            if not name.startswith("_") and not ast.get_docstring(node)
        ]
    return lacking


def test_every_public_name_says_what_it_is():
    trees = {
        name: tree_of(path)
        for name, path in modules().items()
        if not name.startswith(TWINS)
    }
    assert undocumented(trees) == []


def test_a_name_without_a_line_is_seen():
    code = "def f(): pass\ndef _g(): pass\nclass C:\n '''C.'''\n def h(self): pass"
    assert undocumented({"m": ast.parse(code)}) == ["m.C.h", "m.f"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Strict: a dead link or anchor is a warning, and a warning ends it."""
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    pages = list(tmp_path.rglob("index.html"))
    fetched = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://')
    assert [page for page in pages if fetched.search(page.read_text())] == []
