"""Runs in a bucket: a copy here, sent at each save, commit files last."""

import fsspec

from recurjax.files.storage import Store
from recurjax.training.run import mirrored
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
    made = mirror.store.requests.made
    with mirrored(URL) as mirror:
        again = mirror.folder / "checkpoints" / "3" / "state" / "d"
        assert again.read_text() == "arrays" and mirror.steps() == [3]
        mirror.push()
        assert mirror.sent_objects == 0  # nothing has changed
    # It fetched as many as were sent before, and looked once more.
    assert mirror.store.requests.made > made


def test_an_unfinished_step_is_not_sent(bucket):
    with mirrored(URL) as mirror:
        fill(mirror.folder, STEP)
        mirror.push()
        assert not bucket()
        fill(mirror.folder, COMMIT)
        mirror.push()
        assert mirror.steps() == [3]


def test_commit_files_go_last_and_are_removed_first(monkeypatch):
    told = []
    send, remove = Store.send, Store.remove

    def sends(store, file, name):
        told.append(name)
        send(store, file, name)

    def removes(store, names):
        names = list(names)
        told.extend(f"-{name}" for name in names)
        remove(store, names)

    with mirrored(URL) as mirror:
        monkeypatch.setattr(Store, "send", sends)
        monkeypatch.setattr(Store, "remove", removes)
        fill(mirror.folder, STEP | COMMIT | {"config.json": "{}", "tokenizer/a": "t"})
        mirror.push()
        assert told[:2] == ["tokenizer/a", "config.json"]
        assert told[-1] == "checkpoints/3/commit_success.txt"
        told.clear()
        (mirror.folder / "checkpoints/3").rename(
            mirror.folder / "checkpoints/3.damaged"
        )
        mirror.push()
        assert told[3] == "-checkpoints/3/commit_success.txt" and len(told) == 6


def test_a_step_of_which_a_part_is_there_is_left_out_and_removed(bucket):
    memory = fsspec.filesystem("memory")
    for name, text in STEP.items():
        memory.pipe_file(f"{URL}/{name}", text.encode())
    with mirrored(URL) as mirror:
        assert not (mirror.folder / "checkpoints").exists() and mirror.steps() == []
    assert not bucket()
