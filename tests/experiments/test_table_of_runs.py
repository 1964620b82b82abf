"""experiments/README.md lists every run with what it reproduces and costs."""

import re

import pytest

from experiments import table_of_runs
from recurjax.run_table import load_experiment, load_runs
from tests.marks import slow_except

TEXT = table_of_runs.README.read_text()


def rows_of(paper: str) -> dict[str, str]:
    """Returns the README's rows of a paper, by name."""
    part = TEXT.split(f"<!-- {paper}/runs.py -->\n")[1].split("<!-- end -->")[0]
    return {
        row.split("`")[1]: row for row in part.splitlines() if row.startswith("| `")
    }


def test_every_table_of_runs_is_in_the_readme():
    files = table_of_runs.FOLDER.glob("*/runs.py")
    tables = {*table_of_runs.TABLES, table_of_runs.TASKS}
    assert {file.parent.name for file in files} == tables


@pytest.mark.parametrize("paper", table_of_runs.TABLES)
def test_every_run_is_there_with_what_it_reproduces(paper):
    file, rows = table_of_runs.FOLDER / paper / "runs.py", rows_of(paper)
    runs = load_runs(file)
    assert list(rows) == list(runs)
    for name, run in runs.items():
        assert rows[name].startswith(table_of_runs.named(name, run))
    # What the first and the last cost; the slow test looks at all.
    for name in (list(runs)[0], list(runs)[-1]):
        run = load_experiment(f"{file}:{name}")
        costs = table_of_runs.costs(run, f"{paper}/{name}")
        assert rows[name] == table_of_runs.named(name, runs[name]) + costs


def test_every_small_task_is_there_with_what_it_costs():
    tasks = table_of_runs.table_of_tasks()
    assert table_of_runs.filled(TEXT, table_of_runs.TASKS, tasks) == TEXT
    names = load_runs(table_of_runs.FOLDER / "tasks/runs.py")
    for name in names:
        assert any(f"| `{name.rsplit('_', n)[0]}` |" in tasks for n in (1, 2, 3)), name


@pytest.mark.parametrize("paper", [*table_of_runs.TABLES, table_of_runs.TASKS])
def test_a_run_that_reproduces_a_papers_table_skips_no_step(paper):
    runs = load_runs(table_of_runs.FOLDER / paper / "runs.py").items()
    rows = [name for name, run in runs if not run.reproduces.startswith("no table")]
    assert bool(rows) == (paper != table_of_runs.TASKS)
    made = {name: run.make(name) for name, run in runs if name in rows}
    assert not [name for name in rows if made[name].training.spikes.enabled]


@pytest.mark.parametrize(
    "paper",
    slow_except((), table_of_runs.TABLES, slow=["rat", "recurrent_transformer"]),
)
def test_every_run_is_there_with_what_it_costs(paper):
    result = table_of_runs.filled(TEXT, paper, table_of_runs.table(paper))
    assert result == TEXT


def test_hours_are_those_of_the_run_as_it_is():
    run = load_experiment(f"{table_of_runs.FOLDER}/rat/runs.py:fineweb_4k_rat16")
    flops = table_of_runs.training_flops(run)
    for entry, cell in (
        (None, "-"),
        ({"flops": flops, "hours": 12.345}, "12.3"),
        ({"flops": flops, "hours": None}, "does not fit"),
        ({"flops": 2 * flops, "hours": 12.345}, "-"),
    ):
        assert table_of_runs.hours_cell(run, entry) == cell


def test_a_readme_without_a_tables_place_is_told():
    with pytest.raises(ValueError, match=re.escape("<!-- rat/runs.py -->")):
        table_of_runs.filled("nothing", "rat", "")


def test_a_run_of_more_steps_is_planned_by_a_shorter_one(monkeypatch):
    paper, names = "latent_recurrent_transformer", ("base_20_r5", "base_20_r20")
    file = table_of_runs.FOLDER / paper / "runs.py"
    runs = {name: load_experiment(f"{file}:{name}") for name in (*names, "shared_20")}
    monkeypatch.setattr(table_of_runs, "planned_runs", lambda _: iter(runs.items()))
    short, long, other = runs.values()
    flops = table_of_runs.training_flops(short)
    known = {"flops": flops, "hours": 3.0, "binding": "memory", "mesh": {"data": 8}}
    record = {f"{paper}/base_20_r5": known}
    entry = table_of_runs.entry_of_same_step(long, paper, record)
    assert entry is not None
    assert entry["hours"] == 3.0 * long.training.steps / short.training.steps
    assert entry["flops"] == table_of_runs.training_flops(long)
    assert table_of_runs.entry_of_same_step(other, paper, record) is None


def test_the_plans_for_pods_say_the_same_hours():
    """Where both have a run on the same mesh of 8 H100."""
    runs = {
        "RT 300M, batch 512": "recurrent_transformer/c4_300m_recurrent_12",
        "LRT 24 layers": "latent_recurrent_transformer/shared_24",
        "its baseline": "latent_recurrent_transformer/base_24",
        "RAT(16) 1.3B": "rat/fineweb_4k_rat16",
    }
    text = (table_of_runs.FOLDER.parent / "docs" / "design/plans.md").read_text()
    record, compared = table_of_runs.read_record(), []
    for run, mesh, hours in re.findall(
        r"^\| (.+?) \| 8 H100, (\w+ 8) \|.*\| ([^|]+) \| [\d,]+ s \|$",
        text,
        re.MULTILINE,
    ):
        entry = record[runs[run]]
        axis, size = mesh.split()
        if entry["mesh"] != {axis: int(size)}:
            continue
        compared.append(run)
        # A step that does not fit in one part is recorded in several.
        if hours != "does not fit":
            expected = pytest.approx(entry["hours"] / 8, rel=0.02)
            assert float(hours.split()[0]) == expected
    assert len(compared) >= 3
