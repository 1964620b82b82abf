import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading

import fsspec
import pytest

from recurjax.errors import UserError
from recurjax.files.storage import open_store
from recurjax.training.run import run_lock
from recurjax.training.run.run_lock import LOCK, Folder, Holder, Lock, held
from tests.training.bucket import URL


@pytest.fixture
def said():
    return []


class Clock:
    """Replaces the module time: a sleep passes at once, and something may happen."""

    def __init__(self):
        self.now, self.meanwhile = 0.0, lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(run_lock, "time", Clock())
    return run_lock.time


@pytest.fixture
def beats(monkeypatch):
    """Holders beat at once; says when one has touched its lock."""
    beaten, touch = threading.Event(), Lock.touch

    def touches(lock):
        touch(lock)
        beaten.set()

    monkeypatch.setattr(run_lock, "_BEAT", 0.01)
    monkeypatch.setattr(Lock, "touch", touches)
    return beaten


def left_behind(root, **other):
    """The lock of a process that ended without releasing it."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    holder = dataclasses.replace(
        Holder.of_this_process(), pid=ended.pid, token="0123", **other
    )
    root.mkdir()
    assert Lock(Folder(root)).create(holder)
    return holder


def test_a_lock_says_who_and_goes_with_its_block(tmp_path, said):
    root = tmp_path / "runs" / "one"
    with held(root, said.append):
        there = json.loads((root / LOCK).read_text())
        assert there["pid"] == os.getpid() and there["host"] and there["since"]
        assert os.listdir(root) == [LOCK]
        (root / "config.json").touch()
    assert os.listdir(root) == ["config.json"] and said == []


def test_nothing_stays_of_a_directory_that_nothing_was_put_into(tmp_path, said):
    with pytest.raises(ZeroDivisionError), held(tmp_path / "runs" / "a", said.append):
        _ = 1 / 0
    assert os.listdir(tmp_path) == []


def test_a_living_process_is_named_and_left_alone(tmp_path, said):
    with held(tmp_path, said.append) as lock:
        with pytest.raises(UserError) as caught, held(tmp_path, said.append):
            raise AssertionError
        lock.check()
    assert f"{tmp_path} is in use by process {os.getpid()} on " in str(caught.value)
    assert f"remove {tmp_path / LOCK}" in str(caught.value)


def test_a_dead_process_lock_is_taken_over_with_a_sentence(tmp_path, said):
    old = left_behind(tmp_path / "run")
    with held(tmp_path / "run", said.append) as lock:
        lock.check()
    assert said == [
        f"{tmp_path}/run was locked by {old}, which has ended without releasing it"
    ]


def test_a_number_that_another_process_got_is_no_holder(tmp_path, said):
    own = dataclasses.replace(Holder.of_this_process(), born="1", token="0123")
    assert Lock(Folder(tmp_path)).create(own)
    with held(tmp_path, said.append):
        assert len(said) == 1


def test_of_many_who_take_over_at_once_one_holds(tmp_path):
    root = tmp_path / "run"
    left_behind(root)
    start, ended = threading.Barrier(8), threading.Barrier(8)
    got = []

    def take():
        start.wait()
        try:
            with held(root, lambda _: None):
                got.append("held")
                ended.wait()
        except UserError:
            got.append("refused")
            ended.wait()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == ["held"] + ["refused"] * 7
    assert os.listdir(root) == []


def test_the_slower_of_two_successors_does_not_remove_the_faster(tmp_path, said):
    old = left_behind(tmp_path / "run")
    with held(tmp_path / "run", said.append) as lock:
        assert not Lock(Folder(tmp_path / "run")).replace(old, Holder.of_this_process())
        lock.check()
        assert os.listdir(tmp_path / "run") == [LOCK]


def test_on_another_machine_a_holder_lives_while_it_touches(tmp_path, said, clock):
    left_behind(tmp_path / "run", machine="another boot", host="other")
    # The file system's own clock may stand still between two touches.
    file = tmp_path / "run" / LOCK
    clock.meanwhile = lambda: os.utime(file, (clock.now, clock.now))
    with (
        pytest.raises(UserError, match=r"in use by process \d+ on other since"),
        held(tmp_path / "run", said.append),
    ):
        raise AssertionError
    clock.meanwhile = lambda: None
    before = clock.now
    with held(tmp_path / "run", said.append):
        assert "watching for up to" in said[-2] and "which has ended" in said[-1]
    assert 90 <= clock.now - before < 100


def test_a_holder_touches_its_lock(tmp_path, said, beats):
    with held(tmp_path, said.append):
        os.utime(tmp_path / LOCK, (0, 0))
        before = Lock(Folder(tmp_path)).stamp()
        beats.clear()
        assert beats.wait(60) and Lock(Folder(tmp_path)).stamp() != before


def test_who_slept_while_its_lock_was_taken_over_stops(tmp_path, said):
    with held(tmp_path, said.append) as lock:
        other = dataclasses.replace(Holder.of_this_process(), host="other", token="1")
        (tmp_path / LOCK).write_text(json.dumps(dataclasses.asdict(other)))
        with pytest.raises(UserError, match="was taken over by process .* on other"):
            lock.check()
    assert (tmp_path / LOCK).exists()  # The other's.


def test_a_lock_removed_by_hand_is_made_again(tmp_path, said):
    with held(tmp_path, said.append) as lock:
        (tmp_path / LOCK).unlink()
        lock.check()
        with pytest.raises(UserError, match="in use"), held(tmp_path, said.append):
            pass
        shutil.rmtree(tmp_path)


TOKENS = ("../x", "", "a" * 300, "a\0", "a/b")
_FIELDS = dict(host="h", pid=1, since="s", machine="m", born=None)
BAD = ["", "{", "[1]", '{"pid": 1}', "null", "\xff", "[" * 100_000]
BAD += [json.dumps(_FIELDS | {"token": token}) for token in TOKENS]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_lock_that_says_nothing_is_told(tmp_path, said, text, clock):
    (tmp_path / LOCK).write_text(text, encoding="latin-1")
    with (
        pytest.raises(UserError, match="does not say who holds the run directory"),
        held(tmp_path, said.append),
    ):
        raise AssertionError


def test_a_lock_that_is_no_file_is_told(tmp_path, said, clock):
    os.mkfifo(tmp_path / LOCK)
    with (
        pytest.raises(UserError, match="does not say who holds the run directory"),
        held(tmp_path, said.append),
    ):
        raise AssertionError


def test_where_there_are_no_links_one_file_is_opened(tmp_path, said, monkeypatch):
    def link(*_):
        raise OSError(run_lock.errno.ENOTSUP, "no links here")

    monkeypatch.setattr(run_lock.os, "link", link)
    with held(tmp_path, said.append):
        assert os.listdir(tmp_path) == [LOCK]
        with pytest.raises(UserError, match="in use"), held(tmp_path, said.append):
            pass


def test_a_place_that_cannot_be_made_is_told(tmp_path, said):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="run cannot be created: Not a directory"),
        held(tmp_path / "file" / "run", said.append),
    ):
        raise AssertionError


@pytest.fixture
def store():
    """A store in memory, empty before and after."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield open_store(URL, write=True)
    memory.store.clear()


def test_a_bucket_is_locked_by_one_and_free_at_the_end(store, said, beats):
    with held(store, said.append) as lock:
        with (
            pytest.raises(UserError, match=f"{URL} is in use by process {os.getpid()}"),
            held(store, said.append),
        ):
            raise AssertionError
        before = Lock(store).stamp()
        beats.clear()
        assert beats.wait(60) and Lock(store).stamp() != before
        lock.check()
    assert store.sizes() == {} and said == []


def test_a_dead_process_lock_on_a_bucket_is_taken_over_by_one(store, said, clock):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    here = dataclasses.replace(Holder.of_this_process(), pid=ended.pid, token="0123")
    far = dataclasses.replace(here, machine="elsewhere", token="4567")
    for holder, sentences in ((here, 1), (far, 2)):
        assert Lock(store).create(holder)
        assert not Lock(store).create(here)
        with held(store, said.append) as lock:
            assert len(said) == sentences and "ended without releasing" in said[-1]
            lock.check()
            store.write(LOCK, run_lock._content(far))
            with pytest.raises(UserError, match="was taken over by process"):
                lock.check()
        assert Lock(store).read() == far  # somebody else's is not removed
        store.remove([LOCK])
        said.clear()
