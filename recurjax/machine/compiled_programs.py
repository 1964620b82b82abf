"""A cache of compiled programs on disk, shared by the processes of one user.

jax has such a cache and lets each program choose its folder. Its files are written
differently here. An entry is written under another name, renamed, and carries a digest:
jax writes into the final file, so a process that is killed leaves a part of a program
there for good. And the folder has a largest size: the least recently used entries go
first, without the lock on all readers that jax takes for that.

The programs that are read here are run, so the folder belongs to the user and nobody
else may write in it.
"""

import hashlib
import os
import platform
import secrets
import stat
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from recurjax.errors import UserError
from recurjax.machine.caches import VARIABLE, cache_folder

_LARGEST = 4 * 2**30
_LEAST_SECONDS = 0.1
"""Programs that compile in less are not written: reading one takes milliseconds."""
_DIGEST = hashlib.sha256().digest_size


def keep() -> None:
    """Makes this process read compiled programs from disk and write its own there.

    The folder is `$RECURJAX_CACHE/compiled`, by default in the user's cache folder; an
    empty variable turns the cache off. JAX_COMPILATION_CACHE_DIR selects jax's own
    cache instead. jax has no public way to another cache: a version whose private one
    is unknown here (pyproject.toml bounds it) compiles without, and says so.

    Raises:
      UserError: $RECURJAX_CACHE cannot be written, or others may write in the folder.
    """
    import jax
    from jax._src import compilation_cache

    cache = cache_folder()
    configured = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    if cache is None or configured is not None:
        return
    if not hasattr(compilation_cache, "get_file_cache"):
        print(
            "recurjax: compiled programs are not cached, because this version "
            f"of recurjax does not know the cache of jax {jax.__version__}",
            file=sys.stderr,
        )
        return
    folder = cache / "compiled" / _kind()
    try:
        _make_private(folder)
    except OSError as error:
        if VARIABLE not in os.environ:  # no writable home directory, as in a container
            return
        raise UserError(
            f"${VARIABLE}: {folder} cannot be written: {error}; name another folder, "
            "or use --no-cache"
        ) from error
    setattr(  # noqa: B010
        compilation_cache,
        "get_file_cache",
        lambda path: (ProgramCache(Path(path)), path),
    )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)


class ProgramCache:
    """Entries of one folder, by key; jax asks for `get` and `put`.

    Several processes may read and write at once, on shared file systems too: an entry
    appears complete, and two that write the same key write the same program.
    """

    def __init__(self, folder: Path, *, largest: int = _LARGEST):
        self._path = self.folder = folder
        self.largest = largest
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        """Returns an entry; None where there is none, or a damaged one."""
        file = self._file(key)
        try:
            content = file.read_bytes()
            # Not every file system keeps access times; the modification time serves as
            # one.
            now = time.time()
            os.utime(file, (now, now))  # when it was used last
        except OSError:
            return None
        digest, program = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(program).digest() != digest:
            with suppress(OSError):
                file.unlink()
            return None
        return program

    def put(self, key: str, value: bytes) -> None:
        """Keeps an entry, and removes those that were not used for longest."""
        file = self._file(key)
        aside = file.with_name(f".{secrets.token_hex(8)}.partial")
        try:
            aside.write_bytes(hashlib.sha256(value).digest() + value)
            os.replace(aside, file)
        except OSError:  # a full disk costs the next start some time, nothing else
            with suppress(OSError):
                aside.unlink()
            return
        self._prune()

    def clear(self) -> None:
        """Does nothing; jax calls it when it checks what a cache holds."""

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.program"

    def _prune(self) -> None:
        entries = []
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                with suppress(OSError):  # another process removed it
                    status = entry.stat()
                    entries.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.largest:
                break
            with suppress(OSError):
                os.unlink(path)
            total -= size


def _kind() -> str:
    """Names what a program fits: jaxlib, Python's platform and this processor.

    XLA's key knows the program, the flags and the devices. On a CPU the program has
    instructions of the processor that compiled it; a home that several kinds of
    machines share must not hand one's programs to another.
    """
    facts = [platform.machine()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        # What /proc/cpuinfo calls the instruction sets, on x86 and on ARM.
        facts += sorted({x for x in lines if x.startswith(("flags", "Features"))})
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    return f"jaxlib-{version('jaxlib')}-{platform.machine() or 'any'}-{digest}"


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if (hasattr(os, "getuid") and status.st_uid != os.getuid()) or writable:
        raise UserError(
            f"{folder} holds programs that would be run and is writable by "
            f"others: chmod 700 it, name another folder in ${VARIABLE}, or use "
            "--no-cache"
        )
    if not os.access(folder, os.W_OK):
        raise PermissionError("no permission to write")
