import dataclasses
import errno
import json

import pytest
from tensorboardX.record_writer import RecordWriter

from recurjax.data.tokenizers import ByteTokenizer, load_tokenizer
from recurjax.errors import UserError
from recurjax.experiment import read_experiment
from recurjax.training.optimizers import Constant, MuonAdamW
from recurjax.training.run import MetricsWriter, RunDirectory, load_run, plot_losses
from tests.training.tiny_experiment import changed, config


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    assert not run.is_claimed
    run.claim(config(), ByteTokenizer())
    return run


def write(run, steps, resumed_from=0):
    writer = MetricsWriter(run.metrics, run.tensorboard, resumed_from=resumed_from)
    for step in steps:
        writer.write(step, "train", {"loss": 5.0 - step})
    writer.write(steps[-1], "validation", {"loss": 1.0, "perplexity": float("nan")})
    writer.close()


def rows(run):
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_a_claimed_directory_holds_config_and_tokenizer(run):
    assert run.is_claimed
    assert read_experiment(run.config) == config()
    assert load_tokenizer(run.tokenizer).vocabulary == 257


def test_rows_are_numbers_and_what_json_lacks_is_null(run):
    write(run, [1, 2])
    assert rows(run) == [
        {"step": 1, "kind": "train", "loss": 4.0},
        {"step": 2, "kind": "train", "loss": 3.0},
        {"step": 2, "kind": "validation", "loss": 1.0, "perplexity": None},
    ]
    assert any(run.tensorboard.iterdir())


def test_a_full_disk_ends_tensorboard_s_rows_with_an_error_not_with_a_wait(
    run, monkeypatch
):
    def fail(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = MetricsWriter(run.metrics, run.tensorboard, resumed_from=0)
    monkeypatch.setattr(RecordWriter, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        writer.write(1, "train", {"loss": 4.0})
    monkeypatch.undo()
    writer.close()


def test_rewinding_drops_what_will_be_made_again(run):
    write(run, [1, 2, 3])
    for step in (2, 3):
        run.append_samples(step, ["O, my \u2019=== step 9 ===", "second"])
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "ki')  # what a kill cut off
    run.rewind(2)
    assert [row["step"] for row in rows(run)] == [1, 2]
    text = run.samples.read_text(encoding="utf-8")
    assert text.startswith("=== step 2 ===\nO, my") and "=== step 3 ===" not in text
    assert not list(run.root.glob(".*.partial"))
    run.rewind(0)
    assert rows(run) == [] and run.samples.read_text() == ""


DAMAGES = {
    "the zeros of a power cut": lambda lines: [*lines[:2], b"\0" * 40, *lines[2:]],
    "a changed byte": lambda lines: [lines[0], b"}" + lines[1][1:], *lines[2:]],
    "a blank line": lambda lines: [b"", *lines],
    "bytes that are no UTF-8": lambda lines: [lines[0], b'{"\xff": 1}', *lines[1:]],
    "no object": lambda lines: [*lines, b"[1]", b"7", b'"step"'],
    "an object of something else": lambda lines: [b'{"step": "1"}', b"{}", *lines],
    "a loss that is no number": lambda lines: [
        *(b'{"step": 1, "kind": "train", "loss": "a"}', *lines),
        *(b'{"step": 1, "kind": "train", "loss": [1]}', b'{"step": -1, "kind": "x"}'),
    ],
    "too deep": lambda lines: [b"[" * 100_000, *lines],
    "a line in two": lambda lines: [lines[0], lines[1][:9], lines[1][9:], *lines[2:]],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_costs_itself_and_is_told(run, damage):
    write(run, [1, 2, 3])
    lines = run.metrics.read_bytes().splitlines()
    before = b"\n".join(DAMAGES[damage](lines)) + b"\n"
    run.metrics.write_bytes(before)
    lost = [line for line in lines if line not in before.split(b"\n")]
    message = run.rewind(3)
    count = len(before.splitlines()) - len(lines) + len(lost)
    assert message is not None and message.startswith(
        f"{count} damaged lines of {run.root}"
    )
    assert run.metrics.read_bytes().splitlines() == [x for x in lines if x not in lost]
    assert (run.root / "metrics.jsonl.damaged").read_bytes() == before
    assert run.rewind(3) is None


def test_what_was_damaged_before_is_kept_too(run):
    for number in (1, 2):
        run.metrics.write_text(f"{number}\n")
        assert run.rewind(0).endswith("metrics.jsonl.damaged" + "-2" * (number - 1))
    assert (run.root / "metrics.jsonl.damaged").read_text() == "1\n"


def test_whether_a_step_was_evaluated_is_in_the_metrics(run):
    assert not run.was_evaluated(2)
    write(run, [1, 2])
    assert run.was_evaluated(2) and not run.was_evaluated(1)


def test_another_config_is_told_field_by_field(run):
    other = changed(config(), training={"batch": 16}, optimizer={"b1": 0.8})
    with pytest.raises(UserError) as caught:
        run.resume(other)
    assert "training.batch: 16 instead of 8; optimizer.b1: 0.8 inst" in str(
        caught.value
    )


def test_devices_logging_and_prefetch_may_change_between_the_parts_of_a_run(run):
    run.resume(
        changed(
            config(),
            mesh={"data": 2, "tensor": 4},
            training={"log_every": 7, "checkpoint_every": 9, "keep_checkpoints": 1},
            data={"prefetch": 3, "threads": 1},
            evaluation={"sample_prompts": ("O",), "sample_tokens": 7},
        )
    )
    assert read_experiment(run.config).mesh.tensor == 4


def test_a_run_at_a_constant_rate_may_become_longer(run):
    constant = dataclasses.replace(config(), schedule=Constant())
    with pytest.raises(
        UserError, match=r"config \(schedule: Constant instead of Cosine"
    ):
        run.resume(constant)
    run.claim(constant, ByteTokenizer())
    run.resume(changed(constant, training={"steps": 100}))
    assert read_experiment(run.config).training.steps == 100


def test_a_run_whose_weight_decay_ends_with_it_may_not_become_longer(run):
    decaying = dataclasses.replace(
        config(), schedule=Constant(), optimizer=MuonAdamW(weight_decay=0.2)
    )
    run.claim(decaying, ByteTokenizer())
    with pytest.raises(UserError, match="training.steps: 100 instead of 12"):
        run.resume(changed(decaying, training={"steps": 100}))
    same = changed(decaying, optimizer={"weight_decay": 0.0})
    run.claim(same, ByteTokenizer())
    run.resume(changed(same, training={"steps": 100}))
    assert read_experiment(run.config).training.steps == 100


def test_a_run_that_starts_anew_is_not_held_to_the_teacher_of_before(run):
    run.record_frozen("one", 3, "a" * 64)
    with pytest.raises(UserError, match="began with other parameters of one"):
        run.record_frozen("other", 5, "b" * 64)
    run.claim(config(), ByteTokenizer())
    assert run.frozen_step() is None
    run.record_frozen("other", 5, "b" * 64)
    assert run.frozen_step() == 5


def test_a_plot_is_drawn_also_of_rows_without_a_loss(run):
    run.metrics.write_text(
        '{"step": 1, "kind": "train", "loss": null}\n'
        '{"step": 2, "kind": "train", "loss": 3.0}\n'
    )
    plot_losses(run.metrics, run.loss_plot)
    assert run.loss_plot.read_bytes().startswith(b"\x89PNG")
    assert not list(run.root.glob(".*.partial"))


def test_what_cannot_be_loaded_is_told(run, tmp_path):
    with pytest.raises(UserError, match="no run directory at"):
        load_run(tmp_path / "nothing")
    with pytest.raises(
        UserError, match="is not a run directory: it has no config.json"
    ):
        load_run(tmp_path)
    with pytest.raises(UserError, match="has no checkpoint yet: train it first"):
        load_run(run.root)
    ByteTokenizer(bos=False).save(run.tokenizer)
    with pytest.raises(UserError, match="has 256 tokens and the model 257: restore"):
        load_run(run.root)
