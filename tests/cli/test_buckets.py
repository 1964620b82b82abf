"""Runs in a bucket, at the command line; the bucket is fsspec's store in memory."""

import re

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from recurjax.errors import UserError
from recurjax.files.storage import Store, open_store
from recurjax.training.run import load_run
from recurjax.training.run.run_lock import held
from recurjax.training.session import Session
from tests.cli.commands import TINY, assert_refused, recurjax
from tests.training.bucket import URL, bucket
from tests.training.run_contents import assert_same_run

RUNS = "memory://bucket/runs"

__all__ = ["bucket"]


def damage(step):
    """Halves the index of a checkpoint in the bucket, which every restore reads."""
    memory = fsspec.filesystem("memory")
    folder = f"/bucket/runs/tiny/checkpoints/{step}/state/d/"
    [index] = [name for name in memory.store if name.startswith(folder)]
    whole = memory.cat_file(index)
    memory.pipe_file(index, whole[: len(whole) // 2])


def kill_at(monkeypatch, step):
    """Ends training as a kill does: nothing more is sent."""
    read, real = [], Session.next_batch

    def next_batch(session):
        read.append(1)
        if len(read) == step:
            monkeypatch.setattr(Store, "send", refuse)
            raise KeyboardInterrupt
        return real(session)

    def refuse(*_):
        raise UserError("killed")

    monkeypatch.setattr(Session, "next_batch", next_batch)


@pytest.mark.slow
def test_runs_in_a_bucket_resume_bit_for_bit(finished, monkeypatch, bucket, tmp_path):
    for step in (5, 6):  # counted from where each start resumes
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            assert recurjax("train", TINY, "--runs", RUNS)[0] != 0
    code, out, err = recurjax("train", TINY, "--runs", RUNS)
    assert (code, err) == (0, "") and f"finished at step 12: {URL}" in out
    assert "resuming at step" in out
    [messages] = [line for line in out.splitlines() if line.startswith("sent ")]
    assert re.fullmatch(
        r"sent [\d,]+ bytes in \d+ objects, at [1-4] saves and the end, with \d+ "
        "requests of all kinds",
        messages,
    )
    for name, content in bucket().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert_same_run(tmp_path, finished)
    steps = {name.split("/")[1] for name in bucket() if name.startswith("checkpoints")}
    assert len(steps) == 3 and "12" in steps
    assert load_run(URL).step == 12
    assert load_run("memory:/bucket/runs/tiny", step=9).step == 9
    code, out, _ = recurjax("evaluate", URL, "--batch", "512")
    assert code == 0 and '"step": 12' in out and f'"run": "{URL}"' in out
    code, out, _ = recurjax("evaluate", "table", URL)
    assert code == 0 and "bits_per_byte" in out
    damage(12)
    messages = []
    assert load_run(URL, report=messages.append).step == 9
    assert len(messages) == 1 and "Checkpoint 12" in messages[0]
    [oldest] = steps - {"12", "9"}
    damage(9)
    damage(oldest)
    listed = rf"no good checkpoint \(12: .*; 9: .*; {oldest}: "
    with pytest.raises(UserError, match=listed):
        load_run(URL)
    with pytest.raises(UserError, match=r"no good checkpoint \(9: [^;]*\)"):
        load_run(URL, step=9)


def test_what_is_no_run_or_cannot_be_written_is_one_sentence():
    answer = recurjax("generate", RUNS, "--prompt", "a")
    assert_refused(
        answer, "memory://bucket/runs is not a run directory: no config.json"
    )
    answer = recurjax("train", TINY, "--runs", "ftp://host/runs")
    assert_refused(answer, "nothing can be written at ftp://, only at gs://, s3://")


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", URL),
        ("generate", URL, "--prompt", "a"),
        ("train", str(TINY), "--runs", RUNS),
        ("convert", "from-hf", URL, "{out}"),
        ("convert", "to-torch", URL, "{out}"),
        ("data", "merge", URL, "--out", "{out}"),
    ],
)
def test_no_command_writes_what_a_bucket_names_outside(words, bucket, tmp_path):
    outside = MemoryFile(data=b"harm")
    fsspec.filesystem("memory").store[f"/bucket/runs/tiny/../../{tmp_path}"] = outside
    fsspec.filesystem("memory").pipe_file(f"{URL}/config.json", b"{}")
    answer = recurjax(*(word.format(out=tmp_path / "out") for word in words))
    assert_refused(answer, f"{URL} has an object named '../../.*rename or remove")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_a_run_at_a_web_server_is_one_sentence(command):
    options = ("--prompt", "a") if command == "generate" else ()
    answer = recurjax(command, "https://127.0.0.1:9/run", *options)
    assert_refused(answer, "https://127.0.0.1:9/run: a web server lists no files")


def test_a_run_that_somebody_works_on_is_refused_before_anything_is_fetched(bucket):
    with held(open_store(URL, write=True), print):
        answer = recurjax("train", TINY, "--runs", RUNS)
    assert_refused(answer, f"{URL} is in use by process .* remove {URL}/lock")
    assert not bucket()
