"""SECURITY.md as tests: each sentence of its lists is the docstring of a test.

One that is new, or whose words change, fails here until a test states it.
"""

import ast
import re
import tomllib

from recurjax.version import REPORTS
from tests.source_tree import ROOT, modules, tree_of

TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
PRIVATE = {
    "jax._src": "jax",
    "orbax.checkpoint._src": "orbax-checkpoint",
    "uvicorn.protocols": "uvicorn",
}
"""Modules that their packages may change in any release, and the packages."""


def sentences() -> list[str]:
    """Lists those of SECURITY.md that are in a list: each states a behaviour."""
    items = re.findall(r"^- (.*(?:\n  .*)*)", TEXT, re.MULTILINE)
    parts = (re.split(r"\.\s+(?=[A-Z`])", item.rstrip(".")) for item in items)
    return [" ".join(part.split()) + "." for sentences in parts for part in sentences]


def docstrings() -> str:
    """Returns the docstrings of all tests."""
    start = re.compile(r'^def test_\w+\([^)]*\)[^:\n]*:\n    """(.*?)"""', re.M | re.S)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    texts = [text for file in files for text in start.findall(file.read_text())]
    return "\n".join(" ".join(text.split()) for text in texts)


def test_each_sentence_is_the_docstring_of_a_test():
    texts, expected = docstrings(), sentences()
    assert len(expected) > 30
    assert [sentence for sentence in expected if sentence not in texts] == []


def sources() -> dict[str, str]:
    return {name: path.read_text() for name, path in modules().items()}


def test_no_pickle_is_read():
    """No pickle is read, in `.npy` files neither (`allow_pickle=False`)."""
    for name, text in sources().items():
        words = re.findall(r"^\s*(?:import|from) (?:pickle|dill|marshal)\b", text, re.M)
        assert words == [] and "allow_pickle=True" not in text, name
        if ".torch.modules." not in name:
            calls = re.findall(r"torch\.load\([^)]*\)", text)
            assert all("weights_only=True" in call for call in calls), name


def test_no_code_of_a_model_is_trusted():
    """No comparison sets `trust_remote_code`."""
    for name, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", name


def test_the_address_for_reports_is_one_constant():
    assert REPORTS in " ".join(TEXT.split())
    elsewhere = [
        name
        for name, text in sources().items()
        if name != "recurjax.version" and REPORTS in text
    ]
    assert elsewhere == []


def test_constraints_have_no_hashes():
    """`constraints.txt` names versions and no SHA-256.

    With one pip requires one of everything, and a source tree has none.
    """
    assert "--hash" not in (ROOT / "constraints.txt").read_text()


def test_private_modules_are_of_packages_with_an_upper_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for lines in extras for line in lines)]
    for module, package in PRIVATE.items():
        lines = [line for line in wanted if re.match(rf"{package}(\[\w+\])?>=", line)]
        assert lines and all("<" in line for line in lines), module
    for name, text in sources().items():
        private = re.findall(
            r"(?:from|import) ((?!recurjax)\w[\w.]*\._[a-z][\w.]*)", text
        )
        assert all(p.startswith(tuple(PRIVATE)) for p in private), (name, private)
