import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import fsspec
import pytest

from recurjax.errors import UserError
from recurjax.files.storage import open_store
from recurjax.training.run import lock_places, run_lock
from recurjax.training.run.lock_places import LOCK, Holder, LockFile, LockObject
from recurjax.training.run.run_lock import held, held_in_store
from tests.training.bucket import URL


@pytest.fixture
def said():
    return []


@pytest.fixture
def quick(monkeypatch):
    """Holders that beat, and count as silent, in fractions of a second."""
    monkeypatch.setattr(run_lock, "_BEAT", 0.02)
    monkeypatch.setattr(run_lock, "_SILENCE", 0.3)


def left_behind(root, **other):
    """The lock of a process that ended without releasing it."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    holder = dataclasses.replace(
        Holder.of_this_process(), pid=ended.pid, token="0123", **other
    )
    root.mkdir()
    assert LockFile(root / LOCK).create(holder)
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
    assert LockFile(tmp_path / LOCK).create(own)
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
        file = LockFile(tmp_path / "run" / LOCK)
        assert not file.replace(old, Holder.of_this_process())
        lock.check()
        assert os.listdir(tmp_path / "run") == [LOCK]


def test_on_another_machine_a_holder_lives_while_it_touches(tmp_path, said, quick):
    left_behind(tmp_path / "run", machine="another boot", host="other")
    file, ended = LockFile(tmp_path / "run" / LOCK), threading.Event()

    def beat():
        while not ended.wait(0.02):
            file.touch()

    thread = threading.Thread(target=beat)
    thread.start()
    with (
        pytest.raises(UserError, match=r"in use by process \d+ on other since"),
        held(tmp_path / "run", said.append),
    ):
        raise AssertionError
    ended.set()
    thread.join()
    with held(tmp_path / "run", said.append):
        assert "watching for up to" in said[-2] and "which has ended" in said[-1]


def test_a_holder_touches_its_lock(tmp_path, said, quick):
    with held(tmp_path, said.append):
        file = LockFile(tmp_path / LOCK)
        holder = file.read()
        assert holder is not None and run_lock._is_touched(file, holder)


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


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}', "null", "\xff"])
def test_a_lock_that_says_nothing_is_told(tmp_path, said, text, monkeypatch):
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: None)
    (tmp_path / LOCK).write_text(text, encoding="latin-1")
    with (
        pytest.raises(UserError, match="does not say who holds the run directory"),
        held(tmp_path, said.append),
    ):
        raise AssertionError


def test_where_there_are_no_links_one_file_is_opened(tmp_path, said, monkeypatch):
    def link(*_):
        raise OSError(lock_places.errno.ENOTSUP, "no links here")

    monkeypatch.setattr(lock_places.os, "link", link)
    with held(tmp_path, said.append):
        assert os.listdir(tmp_path) == [LOCK]
        with pytest.raises(UserError, match="in use"), held(tmp_path, said.append):
            pass


def test_a_place_that_cannot_be_made_is_told(tmp_path, said):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="run cannot be made: Not a directory"),
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


def test_a_bucket_is_locked_by_one_and_free_at_the_end(store, said, quick):
    with held_in_store(store, said.append) as lock:
        with (
            pytest.raises(UserError, match=f"{URL} is in use by process {os.getpid()}"),
            held_in_store(store, said.append),
        ):
            raise AssertionError
        before = LockObject(store).touched()
        deadline = time.monotonic() + 20
        while LockObject(store).touched() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert LockObject(store).touched() > before
        lock.check()
    assert store.sizes() == {} and said == []


def test_a_dead_process_lock_on_a_bucket_is_taken_over_by_one(store, said, quick):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    here = dataclasses.replace(Holder.of_this_process(), pid=ended.pid, token="0123")
    far = dataclasses.replace(here, machine="elsewhere", token="4567")
    for holder, sentences in ((here, 1), (far, 2)):
        assert LockObject(store).create(holder)
        assert not LockObject(store).create(here)
        with held_in_store(store, said.append) as lock:
            assert len(said) == sentences and "ended without releasing" in said[-1]
            lock.check()
            store.write(LOCK, LockObject(store)._content(far))
            with pytest.raises(UserError, match="was taken over by process"):
                lock.check()
        assert LockObject(store).read() == far  # somebody else's is not removed
        store.remove([LOCK])
        said.clear()
