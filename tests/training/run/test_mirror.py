"""Runs in a bucket: a copy here, sent at each save, commit files last."""

import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from recurjax.errors import UserError
from recurjax.files.storage import Store, open_store
from recurjax.machine import process_group
from recurjax.training.checkpoint.manifest import Manifest
from recurjax.training.checkpoint.step_directory import StepDirectory
from recurjax.training.run import Mirror, load_run, mirrored
from tests.training.bucket import URL, bucket

__all__ = ["bucket"]


def fill(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


STEP = {"checkpoints/3/state/d": "arrays", "checkpoints/3/manifest/m": "{}"}
COMMIT = {"checkpoints/3/commit_success.txt": ""}


def test_what_is_made_here_is_there_and_comes_back(bucket):
    files = {"config.json": "{}", "tensorboard/events": "e"} | STEP | COMMIT
    with mirrored(URL) as mirror:
        fill(mirror.folder, files | {"lock": "held", ".config.json.1.partial": "x"})
    assert {name: text.decode() for name, text in bucket().items()} == files
    size = sum(map(len, files.values()))
    assert mirror.sentence().startswith(
        f"sent {size:,} bytes in {len(files)} objects, at 0 saves and the end, with "
    )
    result = mirror.store.requests.total
    with mirrored(URL) as mirror:
        mirror.fetch_arrays(3)
        again = mirror.folder / "checkpoints" / "3" / "state" / "d"
        assert again.read_text() == "arrays" and mirror.steps() == [3]
        mirror.push()
        assert mirror.sent_objects == 0  # nothing has changed
    # It fetched as many as were sent before, and looked once more.
    assert mirror.store.requests.total > result


def test_an_unfinished_step_is_not_sent(bucket):
    with mirrored(URL) as mirror:
        fill(mirror.folder, STEP)
        mirror.push()
        assert not bucket()
        fill(mirror.folder, COMMIT)
        mirror.push()
        assert mirror.steps() == [3]


def test_commit_files_go_last_and_are_removed_first(monkeypatch):
    messages = []
    send, remove = Store.send, Store.remove

    def sends(store, file, name):
        messages.append(name)
        send(store, file, name)

    def removes(store, names):
        names = list(names)
        messages.extend(f"-{name}" for name in names)
        remove(store, names)

    with mirrored(URL) as mirror:
        monkeypatch.setattr(Store, "send", sends)
        monkeypatch.setattr(Store, "remove", removes)
        fill(mirror.folder, STEP | COMMIT | {"config.json": "{}", "tokenizer/a": "t"})
        mirror.push()
        assert messages[:2] == ["tokenizer/a", "config.json"]
        assert messages[-1] == "checkpoints/3/commit_success.txt"
        messages.clear()
        (mirror.folder / "checkpoints/3").rename(
            mirror.folder / "checkpoints/3.damaged"
        )
        mirror.push()
        assert messages[3] == "-checkpoints/3/commit_success.txt" and len(messages) == 6


def test_a_step_of_which_a_part_is_there_is_left_out_and_removed(bucket):
    memory = fsspec.filesystem("memory")
    for name, text in STEP.items():
        memory.pipe_file(f"{URL}/{name}", text.encode())
    with mirrored(URL) as mirror:
        assert not (mirror.folder / "checkpoints").exists() and mirror.steps() == []
    assert not bucket()


def part(rank):
    return {f"checkpoints/3/state/ocdbt.process_{rank}/d/a": f"arrays {rank}"}


@pytest.fixture
def two(tmp_path, monkeypatch):
    """The mirrors of two processes, which meet as threads here, with a step each."""
    mirrors = []
    for rank in range(2):
        mirror = Mirror(open_store(URL), tmp_path / str(rank), part=rank, parts=2)
        fill(mirror.folder, part(rank) | COMMIT | {"metrics.jsonl": f"of {rank}"})
        mirrors.append(mirror)
    barrier = threading.Barrier(2)
    monkeypatch.setattr(process_group, "barrier", lambda *_, **__: barrier.wait(10))
    return mirrors


def push_both(mirrors):
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(mirror.push) for mirror in mirrors]:
            done.result()


def test_each_process_sends_its_part_and_the_first_what_is_the_runs(two, bucket):
    push_both(two)
    want = part(0) | part(1) | COMMIT | {"metrics.jsonl": "of 0"}
    assert {name: text.decode() for name, text in bucket().items()} == want
    # Kept while the step is, though process 0 never had it; gone with it.
    push_both(two)
    assert part(1).keys() <= bucket().keys()
    for mirror in two:
        (mirror.folder / "checkpoints" / "3" / "commit_success.txt").unlink()
    push_both(two)
    assert bucket().keys() == {"metrics.jsonl"}


def test_a_step_of_which_one_part_was_not_sent_is_not_whole(two, bucket, monkeypatch):
    def nobody(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(process_group, "barrier", nobody)
    with pytest.raises(UserError, match="another process has not sent its part"):
        two[0].push()
    two[0].push(after_save=False)  # at the end, for the metrics
    assert bucket().keys() == {*part(0), "metrics.jsonl"}
    with mirrored(URL) as mirror:
        assert mirror.steps() == []
        assert bucket().keys() == {"metrics.jsonl"}


def test_arrays_are_fetched_when_they_are_read_and_stay_until_then(bucket):
    with mirrored(URL) as mirror:
        fill(mirror.folder, STEP | COMMIT)
    with mirrored(URL) as mirror:
        state = mirror.folder / "checkpoints" / "3" / "state" / "d"
        assert not state.exists()
        mirror.push()
        assert bucket().keys() == {*STEP, *COMMIT}
        mirror.fetch_arrays(3)
        assert state.read_text() == "arrays"


def test_what_was_set_aside_stays_and_keeps_its_name(bucket):
    """Nobody reads it again, so it is not fetched; but only its owner may remove it."""
    aside = {f"checkpoints/{n}/state/d": n for n in ("3.damaged", "6.incomplete-2")}
    with mirrored(URL) as mirror:
        fill(mirror.folder, STEP | COMMIT | aside)
    with mirrored(URL) as mirror:
        assert not any((mirror.folder / name).exists() for name in aside)
        steps = StepDirectory(mirror.folder / "checkpoints")
        mirror.fetch_arrays(3)
        steps.damaged.add(3)
        assert steps.make_way(Manifest(step=6, arrays={}, loss=None, data_states=[]))
    want = {*aside, *(n.replace("/3/", "/3.damaged-2/") for n in STEP | COMMIT)}
    assert bucket().keys() == want
    assert bucket()["checkpoints/3.damaged/state/d"] == b"3.damaged"


def test_a_step_that_the_store_lacks_is_told_with_those_it_has(bucket):
    six = {name.replace("/3/", "/6/"): text for name, text in (STEP | COMMIT).items()}
    with mirrored(URL) as mirror:
        fill(mirror.folder, STEP | COMMIT | six | {"config.json": "{}"})
    with pytest.raises(UserError, match=f"{URL} has no checkpoint 4; it has 3, 6$"):
        load_run(URL, step=4)
