"""Several runs one after another, and the table of what they reach."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from recurjax.data.tasks import Copy, TaskData
from recurjax.errors import UserError
from recurjax.training.sweep import Reached, markdown, sweep
from tests.training.tiny_experiment import changed, config

SHORT = {
    "training": {"steps": 4, "checkpoint_every": 2},
    "evaluation": {"every": 0, "batches": 1},
}


def named(name, **sections):
    experiment = changed(config(), **SHORT)
    return dataclasses.replace(changed(experiment, **sections), name=name)


def swept(experiments, root, **options):
    message = io.StringIO()
    console = Console(file=message, width=10_000)
    return sweep(experiments, root, console=console, **options), message.getvalue()


@pytest.mark.slow
def test_a_run_that_diverges_is_told_and_the_next_ones_are_trained(
    quick_compilation, tmp_path
):
    spikes = dataclasses.replace(config().training.spikes, patience=2)
    bad = named("bad", optimizer={"learning_rate": 1e30}, training={"spikes": spikes})
    experiments = [named("before"), bad, named("after")]
    reached, message = swept(experiments, tmp_path)
    assert (
        "training stopped at step" in message and "start again under another" in message
    )
    before, diverged, after = reached
    assert [run.name for run in reached] == ["before", "bad", "after"]
    assert diverged.diverged and diverged.loss is diverged.bits_per_byte is None
    assert diverged.tokens < before.tokens == after.tokens == 4 * 8 * 16
    assert not after.diverged and after.bits_per_byte == before.bits_per_byte
    table = (tmp_path / "results.md").read_text()
    assert table.splitlines()[3].endswith("|  | diverged |")
    assert table == markdown(reached)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [run["diverged"] for run in stored] == [False, True, False]
    # The same call goes on from there, with the same end.
    assert swept(experiments, tmp_path)[0] == reached


@pytest.mark.slow
def test_of_a_task_s_symbols_the_table_has_losses(quick_compilation, tmp_path):
    task = Copy(letters=4, length=16, shortest=1, longest_string=5, validation_rows=8)
    text = named("copy")
    experiment = dataclasses.replace(
        text,
        model=dataclasses.replace(text.model, vocabulary=task.vocabulary),
        data=TaskData(task=task, prefetch=0),
    )
    ((one,), _) = swept([experiment], tmp_path)
    assert one.bits_per_byte is None and one.loss is not None and not one.diverged
    head, _, row = (tmp_path / "results.md").read_text().splitlines()
    assert "| validation loss |" in head
    assert row.endswith(f"| {one.loss:.3f} | {one.loss:.3f} |")
    # Text has bits per byte, so there is nothing to compare.
    other = one._replace(name="text", bits_per_byte=5.0)
    head, _, row, _ = markdown([one, other]).splitlines()
    assert "| validation bits per byte |" in head and row.endswith("|  |  |")


def test_another_fault_ends_the_sweep(tmp_path):
    with pytest.raises(UserError, match="the tokenizer has 257 tokens and the model"):
        swept([named("bad", model={"vocabulary": 300}), named("after")], tmp_path)
    assert not (tmp_path / "after").exists()


def test_a_seed_that_diverged_is_left_out_of_the_mean():
    one = Reached("one", 0, 1, 512, 1.0, 3.5, 5.0, 1.0)
    lost = one._replace(seed=1, loss=None, bits_per_byte=None, tokens=1, diverged=True)
    other = one._replace(seed=2, bits_per_byte=6.0)
    row = markdown([lost, one, other]).splitlines()[2]
    assert row.endswith("| 5.500 (1.000) | diverged, 5.000, 6.000 |")
    assert "| 512 |" in row
