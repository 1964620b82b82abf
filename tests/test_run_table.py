import sys
from pathlib import Path

import pytest

from recurjax.errors import UserError
from recurjax.run_table import load_experiment, load_runs
from tests.training import tiny_experiment
from tests.training.tiny_experiment import changed, config

IMPORTS = "from tests.training.tiny_experiment import changed, config as tiny\n"
# Not by the constructor: in tests it checks types, for users it does not.
SET = """
def config():
    made = tiny()
    object.__setattr__(made.{})
    return made
"""


def test_an_experiment_file_is_run():
    assert load_experiment(Path(tiny_experiment.__file__)) == config()


FILES = [
    ("x = 3\n", r"e.py has no function config\(\) that returns an Experiment, and"),
    ("def config():\n    return 3\n", r"config\(\) in .*e.py must return .* not int$"),
    ("def config(:\n", r"e.py, line 1 does not parse: "),
    ("import no_such_module\n", "e.py, line 1: ModuleNotFoundError: No module named"),
    (
        IMPORTS + "def config():\n    return changed(tiny(), training={'stepz': 3})\n",
        r"e.py, line 3: TypeError: .* unexpected keyword argument 'stepz'$",
    ),
    (
        IMPORTS + "def config():\n    return changed(tiny(), training={'steps': 0})\n",
        r"e.py, line 3: TrainingConfig\.steps: must be >= 1, got 0$",
    ),
    (
        IMPORTS + SET.format("optimizer, 'b1', '0.9'"),
        r"e.py: config.optimizer.b1 must be of type float, got '0.9'$",
    ),
    (
        IMPORTS + SET.format("evaluation, 'sample_prompts', ['a']"),
        r"e.py: TypeError: to_json: .* tuples.* got list \['a'\]$",
    ),
]


@pytest.mark.parametrize("text, message", FILES, ids=range(len(FILES)))
def test_a_file_that_is_no_experiment_is_told_in_one_line(tmp_path, text, message):
    (tmp_path / "e.py").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_experiment(tmp_path / "e.py")
    assert "\n" not in str(caught.value)


def test_a_file_imports_its_neighbours_and_leaves_nothing_behind(tmp_path):
    """`train`, `plan`, `convert from-authors --experiment` and whatever else takes an
    experiment file, `FILE.py` or `FILE.py:row`, run it, with the modules next to it.

    Two folders with neighbours of one name: each gets its own.
    """
    places, modules = list(sys.path), set(sys.modules)
    for folder, steps in (("one", 3), ("two", 4)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared.py").write_text(f"STEPS = {steps}\n")
        (tmp_path / folder / "e.py").write_text(
            IMPORTS + "from shared import STEPS\n"
            "def config():\n    return changed(tiny(), training={'steps': STEPS})\n"
        )
        result = load_experiment(tmp_path / folder / "e.py")
        assert result == changed(config(), training={"steps": steps})
    with pytest.raises(UserError):
        (tmp_path / "broken.py").write_text("import sys\nsys.path.append('x')\n1 / 0\n")
        load_experiment(tmp_path / "broken.py")
    assert sys.path == places and set(sys.modules) == modules


TABLE = (
    "from recurjax.run_table import Run\n"
    + IMPORTS
    + """
def row(steps):
    def make(name):
        import shared
        assert shared
        return changed(tiny(), training={"steps": steps})
    return Run(make=make, reproduces=f"Table {steps}", expected="loss 3")
RUNS = {"short_8k": row(3), "long_8k": row(4)}
"""
)


@pytest.fixture
def table(tmp_path):
    (tmp_path / "shared.py").write_text("")
    file = tmp_path / "runs.py"
    file.write_text(TABLE)
    return file


def test_a_row_is_asked_for_by_its_name(table):
    for name, steps in (("short_8k", 3), ("long_8k", 4)):
        want = changed(config(), training={"steps": steps})
        assert load_experiment(f"{table}:{name}") == want
        assert load_experiment(table.with_name(f"runs.py:{name}")) == want


def test_a_table_is_listed_and_a_wrong_name_told_what_is_near(table):
    with pytest.raises(UserError) as caught:
        load_experiment(table)
    first, *rows = str(caught.value).splitlines()
    assert first == f"{table} has 2 runs: name one, as in {table}:short_8k"
    assert rows == ["  short_8k  Table 3: loss 3", "  long_8k  Table 4: loss 3"]
    with pytest.raises(UserError, match=r"no run shrt_8k: did you mean short_8k\?$"):
        load_experiment(f"{table}:shrt_8k")
    with pytest.raises(UserError, match="no run x: .*runs.py alone lists them"):
        load_experiment(f"{table}:x")


def test_one_row_needs_no_name(table):
    table.write_text(TABLE + "del RUNS['short_8k']\n")
    want = changed(config(), training={"steps": 4})
    assert load_experiment(table) == load_experiment(f"{table}:") == want


def test_rows_are_read_without_being_made(table):
    table.write_text(
        TABLE + "RUNS['none'] = Run(make=print, reproduces='a', expected='b')"
    )
    rows = load_runs(table)
    assert list(rows) == ["short_8k", "long_8k", "none"]
    assert rows["long_8k"].reproduces == "Table 4"
    with pytest.raises(UserError, match=r"runs.py:none must return .*, not NoneType$"):
        load_experiment(f"{table}:none")


WRONG_TABLES = [
    ("RUNS = {}", r"runs.py: RUNS must be a dict with a Run per row"),
    ("RUNS = [1]", r"runs.py: RUNS must be a dict with a Run per row"),
    ("RUNS['a b'] = RUNS['long_8k']", "letters, digits and _, got 'a b'"),
    ("RUNS['a'] = 3", r"RUNS\['a'\] must be a Run, not int"),
    ("Run(make=row, reproduces='', expected='b')", "reproduces must be a line of text"),
    ("Run(make=row, reproduces='a', expected='b\\nc')", "expected must be a line of"),
    ("def config():\n    return tiny()", r"both RUNS and config\(\): keep one"),
]


@pytest.mark.parametrize("text, message", WRONG_TABLES, ids=range(len(WRONG_TABLES)))
def test_what_is_no_table_is_told(table, text, message):
    table.write_text(TABLE + text + "\n")
    with pytest.raises(UserError, match=message) as caught:
        load_experiment(table)
    assert "\n" not in str(caught.value)


def test_a_file_with_one_run_has_no_rows(tmp_path):
    (tmp_path / "e.py").write_text(IMPORTS + "config = tiny\n")
    with pytest.raises(
        UserError, match="e.py has a single run and no table RUNS: leave :a out"
    ):
        load_experiment(tmp_path / "e.py:a")
    with pytest.raises(UserError, match="e.py has no table RUNS"):
        load_runs(tmp_path / "e.py")


def test_files_that_are_missing_or_not_python_are_named(tmp_path):
    with pytest.raises(UserError, match="no experiment file at .*nothing.py"):
        load_experiment(tmp_path / "nothing.py")
    (tmp_path / "e.yaml").write_text("a: 3")
    with pytest.raises(UserError, match="e.yaml is not a Python file"):
        load_experiment(tmp_path / "e.yaml")
