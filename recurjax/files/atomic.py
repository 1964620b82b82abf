"""Atomic writes of files and folders.

Everything that the library writes for good goes through here. Content is first written
under another name in the same folder, forced to the disk, and then renamed, which file
systems do atomically. After a kill, a full disk or a power cut there is the old file or
the new one, never a part of either.
"""

import errno
import hashlib
import io
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from recurjax.errors import UserError


def write_atomic(file: Path, content: str | bytes) -> None:
    """Writes a file, or leaves the old one as it was.

    A new file's permissions are the process' usual ones, an old one's stay. Through a
    symbolic link the file that it names is replaced, and the link stays.

    Args:
      file: in a folder that exists.
      content: text is written as UTF-8.

    Raises:
      UserError: the name has a NUL, or at that place is something other than a regular
        file: a rename would put a file in the place of a device or a pipe
        (`--json /dev/stdout`).
      OSError: the disk does not take it; nothing is left behind.
    """
    refuse_nul(str(file), "take the NUL out")
    target = Path(os.path.realpath(file))
    mode = _mode_of(target)
    data = content.encode() if isinstance(content, str) else content
    aside = _aside(target)
    descriptor = _create(aside)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            if mode is not None:
                os.fchmod(opened.fileno(), mode)
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(aside, target)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    _sync_folder(target.parent)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Gives a temporary folder, which is renamed to `out` when the block ends well.

    When an error ends the block, the folder is removed. Files in it get at least the
    process' usual permissions: libraries that write through a temporary file of their
    own (safetensors) leave them readable to their owner only.

    Raises:
      UserError: something other than an empty folder is at `out`.
      OSError: the disk does not take it.
    """
    refuse_existing(out)
    out = out.absolute()
    aside = _aside(out)
    try:
        aside.mkdir(parents=True)
        yield aside
        usual = _usual_mode(aside)
        for folder, _, names in os.walk(aside):
            for name in names:
                _open_up(Path(folder) / name, usual)
                _sync(Path(folder) / name)
            _sync_folder(Path(folder))
        os.rename(aside, out)
        _sync_folder(out.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_figure(figure: Any, file: Path, *, dpi: int = 150) -> None:
    """Writes a matplotlib figure as a PNG, entirely or not at all."""
    write_atomic(file, figure_bytes(figure, "png", dpi=dpi))


def figure_bytes(
    figure: Any, format: Literal["png", "svg"], *, dpi: int = 150
) -> bytes:
    """Returns a matplotlib figure as a file, in the plain style of papers.

    Axes with curves have no frame above and on the right, and a light grid.
    """
    from matplotlib import rc_context  # slow to import, and needed here only

    for axes in figure.axes:
        if axes.lines:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(visible=True, which="major", color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
    content = io.BytesIO()
    # Text stays text in an SVG; without a date the same figure has the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "recurjax"}):
        metadata = {"Date": None} if format == "svg" else None
        figure.savefig(content, format=format, dpi=dpi, metadata=metadata)
    return content.getvalue()


def refuse_nul(name: str, remedy: str) -> None:
    """Raises UserError, which ends with the remedy, where a name has a NUL."""
    if "\0" in name:
        raise UserError(f"{name[:200]!r} cannot be a file's name: {remedy}")


def inside(folder: Path, name: object, *, source: Path) -> Path:
    """Returns the file of a plain name in a folder.

    Raises:
      UserError: what names the file, `source`, would lead out of the folder: a path,
        "..", no name at all, or one that no folder takes.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..")
    plain = plain and len(str(name).encode("utf-8", "replace")) <= 255
    if not plain or any(sign in str(name) for sign in "/\\\0"):
        raise UserError(
            f"{source} names {name!r}, which must be the plain name of a file "
            f"in {folder}: correct it"
        )
    return folder / str(name)


def make_folders(folder: Path) -> list[Path]:
    """Makes a folder and those above it; returns the new ones, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def refuse_existing(out: Path) -> None:
    """Raises UserError if something other than an empty folder is at `out`."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists already: choose another place or remove it")


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")


def _mode_of(target: Path) -> int | None:
    """Returns the permissions of the file that is to be replaced, None without one."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{target} is not a regular file and is not replaced: name another file"
        )
    return stat.S_IMODE(mode)


def _create(file: Path) -> int:
    """Opens a file that must be new.

    A file or link that somebody else put there under this name, which nobody can guess,
    is an error and is never written through.
    """
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _usual_mode(folder: Path) -> int:
    """Returns the permissions of a new file, which the process' umask decides."""
    probe = _aside(folder / "mode")
    descriptor = _create(probe)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
        probe.unlink()


def _open_up(file: Path, usual: int) -> None:
    mode = stat.S_IMODE(os.lstat(file).st_mode)
    if not file.is_symlink() and mode | usual != mode:
        os.chmod(file, mode | usual)


def force_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, would outlive a power cut."""
    _sync_folder(path) if path.is_dir() else _sync(path)


def _sync(file: Path) -> None:
    if file.is_symlink():
        return
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Forces a rename to the disk, on file systems where folders can be forced."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM):
            raise


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
