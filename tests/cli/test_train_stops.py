"""Training at the command line: stopped by a signal, out of space, damaged on disk."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from recurjax.training.run import RunDirectory, held
from recurjax.training.session import Session
from tests.cli.commands import TINY, assert_refused, recurjax
from tests.training.run_contents import assert_same_run, metrics
from tests.training.tiny_experiment import changed, config


def resume(run, *options):
    return recurjax("train", TINY, "--runs", run.parent, *options)


@pytest.fixture
def signalled(monkeypatch):
    """Sends this process a signal while it waits for the data of a step."""

    def at(step, number):
        read, real = [], Session.next_batch

        def next_batch(session):
            read.append(1)
            if len(read) == step:
                os.kill(os.getpid(), number)
            return real(session)

        monkeypatch.setattr(Session, "next_batch", next_batch)

    return at


@pytest.mark.parametrize(
    "number, code, word",
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 0, "terminated", marks=pytest.mark.sweep),
    ],
)
def test_a_signal_saves_says_where_and_the_same_command_resumes(
    finished, signalled, monkeypatch, tmp_path, number, code, word
):
    run = tmp_path / "tiny"
    signalled(5, number)
    got, out, err = resume(run)
    assert (got, err) == (code, "")
    assert out.endswith(
        f"{word} at step 5, saved in {run}: run the same command again to resume\n"
    )
    assert (run / "checkpoints" / "5").is_dir()
    monkeypatch.undo()
    got, out, err = resume(run)
    assert (got, err) == (0, "") and "resuming at step 5 of 12" in out
    assert_same_run(run, finished)


def test_a_second_ctrl_c_does_not_wait(monkeypatch, tmp_path):
    def twice(session):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Session, "next_batch", twice)
    assert resume(tmp_path / "tiny")[::2] == (130, "recurjax: interrupted\n")


def saved(run):
    return sorted(int(p.name) for p in (run / "checkpoints").iterdir())


def test_a_run_that_diverges_names_a_checkpoint_from_before(
    quick_compilation, tmp_path
):
    # At a rate of 1e9 the first update destroys the model: no checkpoint is good, and
    # while steps are skipped none takes the place of those before.
    often = ["--training.steps", 40, "--training.checkpoint-every", 1]
    often += ["--training.spikes.patience", 7]
    answer = resume(tmp_path / "tiny", *often, "--optimizer.learning-rate", 1e9)
    assert_refused(answer, r"stopped at step \d+ after 7 skipped steps in a row \(the")
    assert re.search("norm is (inf|nan)|loss is nan|far above", answer[2])
    assert "the last good checkpoint" not in answer[2]
    step = int(re.search(r"at step (\d+)", answer[2])[1])
    assert max(saved(tmp_path / "tiny")) <= step - 7


@pytest.mark.slow
def test_a_run_of_which_no_step_counted_does_not_end_well(quick_compilation, tmp_path):
    few = ["--training.steps", 5, "--optimizer.learning-rate", 1e30]
    answer = resume(tmp_path / "tiny", *few)
    assert_refused(answer, "reached step 5 without one accepted step")
    assert "(1 in a row): the update's norm is inf" in answer[1].replace("\n", " ")
    assert_refused(resume(tmp_path / "tiny", *few), "without one accepted step")


def test_a_run_without_a_finite_loss_ends_with_2_and_draws_nothing(
    quick_compilation, tmp_path
):
    wild = ["--training.steps", 4, "--optimizer.learning-rate", 1e30]
    run = tmp_path / "tiny"
    answer = resume(run, *wild, "--training.spikes.no-enabled")
    assert_refused(answer, "reached step 4 with a validation loss that is not finite")
    assert_refused(resume(run, *wild, "--training.spikes.no-enabled"), "not finite")
    answer = recurjax("evaluate", run)
    assert answer[0] == 2 and "the loss of" in answer[2]
    assert json.loads(answer[1])["loss"] is None and "NaN" not in answer[1]
    answer = recurjax("generate", run, "--prompt", "a")
    assert (answer[0], answer[1]) == (2, "") and "logits are not finite" in answer[2]


def test_a_second_process_in_a_run_directory_changes_nothing(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "tiny")
    with held(run, print):
        before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
        answer = resume(run)
        assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert_refused(answer, rf"{run} is in use by process {os.getpid()} on .* since ")
    assert not (run / "lock").exists()


def cut_arrays(run, step):
    """Truncates every file of a checkpoint's arrays."""
    for file in (run / "checkpoints" / str(step) / "state").rglob("d/*"):
        os.truncate(file, file.stat().st_size // 2)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "tiny")
    cut_arrays(run, 12)
    code, out, err = recurjax("evaluate", run, "--batch", 512)
    assert code == 0 and '"step": 9' in out
    assert err.startswith(f"Checkpoint 12 in {run}/checkpoints is damaged and is left ")
    code, out, err = resume(run)
    assert (code, err) == (0, "")
    said = out.replace("\n", " ")
    assert f"Checkpoint 12 in {run}/checkpoints is damaged" in said
    assert "resuming at step 9 of 12" in said
    assert_same_run(run, finished)


def test_without_a_good_checkpoint_nothing_is_trained_or_removed(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "tiny")
    steps = sorted(os.listdir(run / "checkpoints"))
    for step in steps:
        cut_arrays(run, step)
    rows = metrics(run)
    answers = [resume(run), recurjax("evaluate", run)]
    answers.append(recurjax("generate", run, "--prompt", "a"))
    for code, _, err in answers:
        sentence = err.splitlines()[-1]
        assert code == 2 and sentence.startswith("recurjax: ")
        assert "holds no good checkpoint (12: " in sentence
    assert sorted(os.listdir(run / "checkpoints")) == steps
    assert metrics(run) == rows


def test_a_checkpoint_of_other_shapes_is_told_name_by_name(finished, tmp_path):
    run = RunDirectory(tmp_path / "tiny")
    narrow = changed(config(), model={"tied_head": False})
    shutil.copytree(finished, run.root)
    run.config.unlink()
    run.claim(narrow, run.load_tokenizer(config()))
    answer = resume(run.root, "--model.no-tied-head")
    assert_refused(answer, r"checkpoint 12 .* does not fit .*model.w_head is not in")
    assert_refused(recurjax("evaluate", run.root), r"does not fit .*w_head is not in")


def test_a_value_that_leaves_all_shapes_is_told(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "tiny")
    text = (run / "config.json").read_text()
    assert '"base": 10000.0' in text
    (run / "config.json").write_text(text.replace("10000.0", "500000.0"))
    answer = recurjax("generate", run, "--prompt", "a")
    where = r"model\.stack\.attention\.position\.base: 500000\.0 instead of 10000\.0"
    assert_refused(answer, rf"checkpoint 12 .* does not fit .*: {where}")


@pytest.mark.slow
def test_a_full_disk_while_saving_leaves_the_last_good_checkpoint(
    quick_compilation, tmp_path
):
    checkpoints = tmp_path / "tiny" / "checkpoints"
    checkpoints.mkdir(parents=True)
    apart = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1m none '{checkpoints}'"
    try:
        subprocess.run([*apart, mount], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system of its own: {error}")
    options = f"--runs '{tmp_path}' --training.keep-checkpoints 100"
    command = f"'{sys.executable}' -m recurjax train '{TINY}' {options}"
    often = "--training.checkpoint-every 1"
    script = f"""{mount}; {command} {often}; echo "exit code $?"
      ls '{checkpoints}'; echo end of list
      mount -o remount,size=9m '{checkpoints}'; {command}; echo "exit code $?" """
    done = subprocess.run(
        [*apart, script],
        capture_output=True,
        text=True,
        timeout=240,
        env=quick_compilation,
    )
    first, _, second = done.stdout.partition("end of list\n")
    assert "exit code 2" in first, done
    assert done.stderr.count("\n") == 1, done.stderr
    sentence = done.stderr.strip()
    numbers = re.findall(r"checkpoint (?:is )?(\d+)", sentence)
    assert len(numbers) == 2, sentence
    failed, good = map(int, numbers)
    assert sentence == (
        f"recurjax: checkpoint {failed} could not be written to {checkpoints}: "
        f"no space left on the device; the last good checkpoint is {good}."
    )
    # What was written of the failed one may be there: the next start removes it.
    names = first.split("exit code 2\n")[1].split()
    listed = sorted(int(name) for name in names if name.isdigit())
    assert listed == list(range(1, good + 1)) and good == failed - 1
    assert f"resuming at step {good} of 12" in second and "exit code 0" in second
