"""Wrong code that a seed draws: what the operators change, and which tests are near."""

import ast
import json

import pytest

from tests.source_tree import ROOT
from tests.trials import sampled_mutations
from tests.trials.sampled_mutations import (
    REASONS,
    Draws,
    mutants,
    nearest,
)

SOURCE = b'''"""Doc 1."""
from a import b


@decorator(1)
def f(x: int = 2, *, y: "3" = None) -> 4:
    """Doc."""
    if x < 5 and not y:
        raise ValueError(f"{x + 6}")
    self.z = min(x, -y)
    x += 1
    while ready():
        continue
    g(x)
    return x + 1.5 if y else "a" + "b"
'''


def test_operators_change_what_is_computed_and_nothing_else():
    changes = {(m.old, m.new) for m in mutants(SOURCE, "a.py")}
    assert changes == {
        ("2", "3"),
        ("x < 5 and not y", "(x < 5 or not y)"),
        ("x < 5", "(x <= 5)"),
        ("5", "6"),
        ("not y", "(y)"),
        ("self.z = min(x, -y)", "pass"),
        ("min", "max"),
        ("-y", "(y)"),
        ("x += 1", "pass"),
        ("1", "2"),
        ("ready()", "(not ready())"),
        ("continue", "pass"),
        ("g(x)", "pass"),
        ("x + 1.5", "(x - 1.5)"),
        ("1.5", "4.0"),
        ("y", "(not y)"),
    }


def test_each_change_is_python_and_changes_one_place():
    for mutant in mutants(SOURCE, "a.py"):
        new = SOURCE[: mutant.start] + mutant.new.encode() + SOURCE[mutant.end :]
        assert ast.dump(ast.parse(new)) != ast.dump(ast.parse(SOURCE))
        assert SOURCE[mutant.start : mutant.end].decode() == mutant.old


def test_places_are_counted_in_bytes():
    source = 'x = "é" if y < 1 else 2\n'.encode()
    [less] = [m for m in mutants(source, "a.py") if m.old == "y < 1"]
    assert source[less.start : less.end] == b"y < 1"


@pytest.mark.parametrize(
    "file, first",
    {
        "recurjax/layers/norm.py": "tests/layers/test_norm.py",
        "recurjax/serving/metrics.py": "tests/serving/test_metrics.py",
        "recurjax/data/prepared/writing.py": "tests/data/prepared/test_prepare.py",
        "pallas_kernels/gated_scan/triton.py": (
            "tests/pallas_kernels/gated_scan/test_triton.py"
        ),
        "recurjax/plan/traffic.py": "tests/plan/test_plan.py",
        "recurjax/cli/plan.py": "tests/plan/test_plan.py",
    }.items(),
)
def test_the_nearest_tests_mirror_the_file_or_import_it(file, first):
    assert nearest(file)[0] == first


def test_a_number_draws_the_same_mutant_again(monkeypatch):
    monkeypatch.setattr(sampled_mutations, "code", lambda: ["recurjax/ranges.py"])
    monkeypatch.setattr(
        sampled_mutations, "changed_lines", lambda since: {"recurjax/ranges.py": {9}}
    )
    draws = [Draws(0, "x") for _ in range(2)]
    assert [draws[0][n] for n in range(9)] == [draws[1][n] for n in range(9)]
    assert len({draws[0][n].name for n in range(0, 40, 2)}) > 5


def test_a_reason_names_a_line_that_is_there_and_says_why():
    rows = [json.loads(line) for line in REASONS.read_text().splitlines()]
    for row in rows:
        file = row["mutant"].partition(": ")[0]
        lines = [line.strip() for line in (ROOT / file).read_text().splitlines()]
        assert row["code"] in lines and len(row["reason"]) > 20, row
