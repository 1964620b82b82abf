"""Files and folders that appear complete or not at all."""

import os
import stat
import subprocess
import sys

import pytest

from recurjax.errors import UserError
from recurjax.files import atomic as files
from recurjax.files.atomic import new_folder, write_atomic
from tests.source_tree import ROOT


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def synced(monkeypatch):
    """Records what is forced to the disk, in order, with the renames."""
    seen, fsync, replace, rename = [], os.fsync, os.replace, os.rename

    def record_sync(descriptor):
        seen.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record(move):
        def moved(old, new):
            seen.append(f"-> {os.path.basename(new)}")
            move(old, new)

        return moved

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record(replace))
    monkeypatch.setattr(os, "rename", record(rename))
    return seen


@pytest.mark.parametrize("content", ["a\nΩ", b"\x00\xff"])
def test_content_is_on_the_disk_before_its_name_is(content, tmp_path, synced):
    file = tmp_path / "config.json"
    write_atomic(file, content)
    want = content.encode() if isinstance(content, str) else content
    assert file.read_bytes() == want and names(tmp_path) == ["config.json"]
    aside, renamed, folder = synced
    assert aside.startswith(".config.json.") and aside.endswith(".partial")
    assert (renamed, folder) == ("-> config.json", tmp_path.name)


def test_two_writes_share_no_temporary_name(tmp_path, synced):
    for _ in range(2):
        write_atomic(tmp_path / "a", "x")
    assert synced[0] != synced[3]


def test_a_file_in_the_way_of_the_temporary_one_is_not_written_through(
    tmp_path, monkeypatch
):
    (tmp_path / "precious").write_text("kept")
    planted = tmp_path / "planted"
    planted.symlink_to(tmp_path / "precious")
    monkeypatch.setattr(files, "_aside", lambda target: planted)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "a", "x")
    assert (tmp_path / "precious").read_text() == "kept"
    assert planted.is_symlink() and names(tmp_path) == ["planted", "precious"]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_after_a_full_disk_the_old_file_is_there_and_nothing_else(
    moment, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = tmp_path / "a"
    file.write_text("old")
    monkeypatch.setattr(os, moment, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(file, "new")
    assert file.read_text() == "old" and names(tmp_path) == ["a"]


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UserError, match="is not a regular file"):
            write_atomic(target, "x")
    with pytest.raises(UserError, match="/dev/full is not a regular file"):
        write_atomic(tmp_path / ".." / ".." / "/dev/full", "x")
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_links_and_permissions_stay(tmp_path):
    (tmp_path / "deep").mkdir()
    real, link = tmp_path / "deep" / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_atomic(link, "new")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    write_atomic(tmp_path / "fresh", "x")
    (tmp_path / "usual").write_text("x")
    assert (tmp_path / "fresh").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    file = tmp_path / "a"
    file.write_text("old")
    code = (
        "import os, signal, sys, pathlib\n"
        "from recurjax.files import atomic as files\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_atomic(pathlib.Path(sys.argv[1]), 'new')\n"
    )
    child = subprocess.run([sys.executable, "-c", code, str(file)], cwd=ROOT)
    assert child.returncode == -9 and file.read_text() == "old"


def test_a_folder_appears_whole(tmp_path, synced):
    out = tmp_path / "new" / "out"
    with new_folder(out) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("x")
        (aside / "link").symlink_to("inner/file")
        assert not out.exists()
    assert (out / "inner" / "file").read_text() == "x"
    assert names(out.parent) == ["out"]
    assert synced.index("file") < synced.index("-> out")
    assert synced[-1] == "new"


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt()])
def test_a_folder_that_failed_leaves_nothing_behind(error, tmp_path):
    with pytest.raises(type(error)), new_folder(tmp_path / "out") as aside:
        (aside / "file").write_text("x")
        raise error
    assert names(tmp_path) == []


def test_a_folder_that_is_taken_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as aside:
        (aside / "file").write_text("x")
    with (
        pytest.raises(UserError, match="exists already"),
        new_folder(tmp_path / "empty"),
    ):
        pass
    assert names(tmp_path / "empty") == ["file"]


def test_a_name_with_a_nul_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be a file's name: take the NUL out"):
        write_atomic(tmp_path / "a\0b", "x")
    assert names(tmp_path) == []
