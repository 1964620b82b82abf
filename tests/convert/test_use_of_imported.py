"""Training that goes on from an imported Hugging Face model."""

import json

import numpy as np
import pytest

from recurjax.parameters import to_nested_dict
from recurjax.training.run import load_run
from tests.cli.commands import assert_refused, recurjax
from tests.convert.hf_directories import LLAMA, copy_of

EXPERIMENT = """
import dataclasses
from pathlib import Path
from recurjax.experiment import read_experiment

def config():
    imported = Path({imported!r})
    experiment = read_experiment(imported / "config.json")
    return dataclasses.replace(
        experiment,
        name="further",
        data=dataclasses.replace(experiment.data, prefetch=0),
        training=dataclasses.replace(
            experiment.training,
            steps=2, batch=8, length=8, log_every=1, start_from=str(imported)
        ),
        evaluation=dataclasses.replace(experiment.evaluation, every=2, batches=1),
    )
"""


@pytest.fixture
def imported(tmp_path):
    directory = copy_of(LLAMA, tmp_path / "hf", tokens=131)
    code, _, err = recurjax(
        "convert", "from-hf", directory, tmp_path / "imported", "--no-check"
    )
    assert (code, err) == (0, "")
    return tmp_path / "imported"


@pytest.mark.slow
def test_training_goes_on_from_an_imported_model(imported, tmp_path, quick_compilation):
    file = tmp_path / "experiment.py"
    file.write_text(EXPERIMENT.format(imported=str(imported)))
    code, _, err = recurjax("train", file, "--runs", tmp_path / "runs")
    assert code == 0, err
    run = tmp_path / "runs" / "further"
    said = f"starting from the parameters of {imported} at step 0"
    assert said in (run / "log").read_text()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]
    before = to_nested_dict(load_run(imported).model)["w_embedding"]
    after = to_nested_dict(load_run(run).model)["w_embedding"]
    change = np.abs(np.asarray(after) - np.asarray(before)).max()
    # Two steps of AdamW move a weight by little more than the rate each.
    rate = 1e-5
    assert 0 < change < 4 * rate
    answer = recurjax("train", file, "--runs", tmp_path, "--name", "imported")
    assert_refused(answer, "holds an imported model")
