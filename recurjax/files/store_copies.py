"""Folders and files of a store, copied to this machine or sent from it.

A copy stays in the user's cache and is fetched once: its name there is a digest of
where it lies and of what the store says of its content, so that an object which was
replaced is fetched again. Several processes may fetch the same object at once, as each
copy appears whole. The cache has no largest size: all there may be removed at any time.
"""

import atexit
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from recurjax.errors import UserError
from recurjax.files.atomic import sha256_of
from recurjax.files.storage import Store, open_store
from recurjax.machine import caches

_FOLDER = "stores"
_passing: list[Path] = []


def cache_folder() -> Path:
    """Returns the folder of all copies: `$RECURJAX_CACHE/stores`.

    By default it is in the user's cache folder. The variable set to nothing stands for
    a folder that is removed when the process ends.
    """
    kept = caches.cache_folder()
    if kept is None:
        if not _passing:
            _passing.append(Path(tempfile.mkdtemp(prefix="recurjax-stores-")))
            atexit.register(shutil.rmtree, _passing[0], ignore_errors=True)
        return _passing[0]
    return kept / _FOLDER


def copy_of(store: Store, name: str, *, sha256: str | None = None) -> Path:
    """Returns a copy of an object as a file of this machine, fetched at most once.

    Args:
      store: where it lies.
      name: of the object, relative to the store's URL; "" for the URL itself.
      sha256: that the content must have; None: the store's word is taken.

    Raises:
      UserError: it is not there, it is other content, or the cache cannot be written.
    """
    url = f"{store.url}/{name}" if name else store.url
    file = _copy(url, sha256 or store.stamp(name))
    if file.is_file():
        return file
    aside = file.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(name, aside)
        if sha256 is not None and sha256_of(aside) != sha256:
            raise _damaged(url)
        os.replace(aside, file)
    except OSError as error:
        raise _unwritable(file.parent, error) from error
    finally:
        with suppress(OSError):
            aside.unlink()
    return file


def mended_copy_of(store: Store, name: str, *, sha256: str) -> Path:
    """Returns a copy as `copy_of`, which is read through and fetched anew if damaged.

    The cache's disk may have damaged it since it was fetched.
    """
    file = _copy(f"{store.url}/{name}", sha256)
    if file.is_file() and sha256_of(file) != sha256:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(file.parent, error) from error
    return copy_of(store, name, sha256=sha256)


def check_object(store: Store, name: str, *, sha256: str) -> None:
    """Reads an object through where it lies, whatever copies there are.

    Raises:
      UserError: it is not there, or it is other content.
    """
    if store.sha256(name) != sha256:
        raise _damaged(f"{store.url}/{name}")


def folder_for(url: str, content: str) -> Path:
    """Names a folder of the cache for what lies at a URL and has this content."""
    return _place(url, content)


@contextmanager
def sent_folder(url: str, *, last: str) -> Iterator[Path]:
    """Gives a folder of this machine that is sent to a store when the block ends well.

    The folder lies in the cache and is the same for each call with this URL: what is
    kept beside it of work that was stopped is found again. Where the block ends by an
    error nothing is sent, and the folder stays until the next call. Where sending ends
    by one, what was sent is removed again.

    Args:
      url: of the new folder; nothing may lie there.
      last: the file that is sent last and so marks the others as whole.

    Raises:
      UserError: something lies there already, or the store cannot be written.
    """
    store = open_store(url, write=True)
    store.check_writable()
    if store.sizes():
        raise UserError(f"{url} exists already: choose another place or remove it")
    folder = _place(url, "sent") / (PurePosixPath(url).name or "folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():  # of a call whose sending failed
            shutil.rmtree(folder)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    yield folder
    files = {
        file.relative_to(folder).as_posix(): file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    try:
        for name in sorted(files, key=lambda name: (name == last, name)):
            store.send(files[name], name)
    except BaseException:  # Ctrl-C too
        # Half a folder would be in the way of the next call.
        with suppress(UserError):
            store.remove(store.sizes())
        raise
    shutil.rmtree(folder.parent, ignore_errors=True)


@contextmanager
def fetched_folder(url: str) -> Iterator[Path]:
    """Gives a copy of a folder of a store, or of one object, for the time of a block.

    Raises:
      UserError: nothing lies there, or it cannot be read.
    """
    store = open_store(url)
    names = store.sizes()
    if not names:
        raise UserError(f"{url}: nothing lies there")
    with tempfile.TemporaryDirectory(prefix="recurjax-copy-") as made:
        root = Path(made) / (PurePosixPath(url).name or "folder")
        for name in names:
            store.fetch(name, root / name if name else root)
        yield root


def _copy(url: str, key: str) -> Path:
    return _place(url, key) / PurePosixPath(url).name


def _damaged(url: str) -> UserError:
    return UserError(
        f"{url} is damaged: its checksum is not the one that was written down; put it "
        "there again"
    )


def _place(url: str, key: str) -> Path:
    digest = hashlib.sha256(f"{url}\n{key}".encode()).hexdigest()
    return cache_folder() / digest[:32]


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{folder} cannot be written: {error.strerror or error}; name another folder "
        f"in ${caches.VARIABLE}"
    )
