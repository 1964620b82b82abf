"""`recurjax evaluate task RUN NAME`: a run's own task, and a named one of any run."""

import json
import re

import pytest

from recurjax.data.tasks import HashHop
from recurjax.data.tasks.dataset import NAMED, check_named, limited, name_of
from recurjax.errors import UserError
from recurjax.evaluation.accuracy import curves_of
from recurjax.evaluation.rows import read_rows
from tests.cli.commands import assert_refused, experiment_file, recurjax

TASK = """return changed(
        dataclasses.replace(
            tiny(),
            data=TaskData(
                task=Mqar(
                    vocabulary=257,
                    train=(Setting(16, 2, 40),),
                    validation=(Setting(16, 2, 9), Setting(32, 4, 9)),
                ),
                seed=3,
            ),
        ),
        training={"steps": 2},
    )"""


@pytest.fixture(scope="module")
def recalling(quick_compilation, tmp_path_factory):
    """A run of two steps on MQAR."""
    folder = tmp_path_factory.mktemp("mqar")
    file = experiment_file(folder, TASK)
    imports = "import dataclasses\nfrom recurjax.data.tasks import *\n"
    file.write_text(imports + file.read_text())
    code, _, err = recurjax("train", file, "--runs", folder)
    assert (code, err) == (0, "")
    return folder / "tiny"


def test_a_run_trained_on_a_task_is_tested_on_its_own(recalling, tmp_path):
    png = tmp_path / "pairs.png"
    words = ("mqar", "--limit", 4, "--batch", 4, "--plot", png)
    code, out, err = recurjax("evaluate", "task", recalling, *words)
    assert (code, err) == (0, "")
    got = json.loads(out)
    assert (got["task"], got["length"]) == ("mqar", 32)
    # Four rows of either setting: 4 x 2 and 4 x 4 answers.
    assert got["tokens"] == 24 and got["accuracy"]["rows"] == 8
    assert set(got["accuracy"]["slices"]) == {
        *("length=16", "length=32", "pairs=2", "pairs=4")
    }
    assert png.read_bytes().startswith(b"\x89PNG")
    kept = {row.metric: row for row in read_rows(recalling) if row.task == "mqar"}
    assert kept["accuracy/pairs=4"].settings == {"length": 32, "vocabulary": 257}
    assert {(row.seed, row.limit) for row in kept.values()} == {(3, 4)}
    assert kept["sequence_accuracy"].n == 8
    # A slice's figure is known by its own answers.
    assert [kept[f"accuracy/pairs={n}"].n for n in (2, 4)] == [8, 16]
    assert kept["accuracy"].n == 24
    # Of 4 x 2 and 4 x 4 answers a value of the row is right for each row once.
    assert [kept[f"accuracy/pairs={n}"].floor for n in (2, 4)] == [0.5, 0.25]
    assert kept["accuracy"].floor == got["accuracy"]["floor"] == 8 / 24


def test_any_run_reads_a_task_of_a_fitting_vocabulary(finished):
    code, out, err = recurjax(
        *("evaluate", "task", finished, "s3", "--limit", 3, "--length", 256)
    )
    assert (code, err) == (0, "")
    got = json.loads(out)
    assert got["tokens"] == 3 * 256 and len(got["accuracy"]["positions"]) == 256
    assert got["bytes"] == 0
    for words, pattern in [
        (("mqar",), "mqar has 8192 tokens and the model 257: train"),
        (("mqer",), r"there is no task mqer: did you mean mqar\?"),
        (("mad_compression",), "mad_compression needs a run"),
        (("s3", "--length", 8), "is shorter than the task"),
        (("s3", "--split", "train"), "no option --split"),
        (("s3", "--text", "x"), "no option --text"),
        (("s3", "--limit", 0), "--limit: must be >= 1"),
    ]:
        assert_refused(recurjax("evaluate", "task", finished, *words), pattern)


def test_chains_are_told_beside_accuracies(finished, monkeypatch):
    monkeypatch.setitem(NAMED, "hash_hop", HashHop(size=4, hops=4, length=178))
    code, out, err = recurjax(
        *("evaluate", "task", finished, "hash_hop", "--limit", 1, "--batch", 1)
    )
    assert (code, re.sub(r".*items/s\n", "", err)) == (0, "")
    got = json.loads(out)
    assert got["h_gq"] == 0.0 and got["bytes"] == got["tokens"] == 4 * 7 + 1


def test_every_task_has_one_name_and_can_be_cut():
    for name, task in NAMED.items():
        check_named(name)
        assert name_of(task) == name
        few = limited(task, 2)
        assert few.count("validation") == 2 * len(getattr(task, "validation", [1]))
        assert limited(task, None) is task
    with pytest.raises(UserError, match="there is no task xyz: known: mqar, hash_hop"):
        check_named("xyz")


def test_a_picture_has_a_field_for_each_kind_of_slice():
    slices = {"pairs=8": 0.5, "pairs=16": 0.25, "length=64": 1.0}
    curves = curves_of(slices, [None, None, 0.5])
    assert curves == {"pairs": ([8, 16], [0.5, 0.25]), "length": ([64], [1.0])}
    assert curves_of({}, [0.5, 1.0])["position"] == ([0, 1], [0.5, 1.0])
