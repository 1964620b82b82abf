"""Finds the files that a corpus' patterns name: here, on the hub, in a store."""

import glob
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from recurjax.errors import UserError
from recurjax.files.hub import hub_errors
from recurjax.files.storage import copy_of, open_store

_HUB = "hf://"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFile:
    """One file of a corpus.

    Attributes:
      name: where it is; what messages call it.
      size: in bytes.
      open: opens it for reading bytes, anywhere in it.
      local: returns it as a file of this machine; what is elsewhere is copied into a
        cache, once.
    """

    name: str
    size: int
    open: Callable[[], IO[bytes]]
    local: Callable[[], Path]

    def __str__(self) -> str:
        return self.name

    @property
    def suffix(self) -> str:
        """The last extension of its name, with the dot."""
        return PurePosixPath(self.name).suffix


def matching_files(patterns: tuple[str, ...]) -> list[CorpusFile]:
    """Lists the files of all patterns, each once: pattern by pattern, sorted within.

    A pattern is a path or a glob; `**` crosses folders, `~` is the home folder.
    `hf://datasets/OWNER/NAME/**/*.parquet` is on the Hugging Face hub (`NAME@REVISION`
    for a revision of it), `gs://BUCKET/**/*.txt` and `s3://...` in a store, and
    `https://HOST/FILE` a single file.

    Raises:
      UserError: a pattern matches no file, or a file may not be read.
    """
    # A file that two patterns match is read once, where it came first. Of this machine
    # it may have two names: a path from here and one from the root, or a link.
    files: dict[str, CorpusFile] = {}
    for pattern in patterns:
        place = _place_of(pattern)
        matches = place.matching(pattern)
        if not matches:
            raise UserError(f"no file matches {pattern!r}: check the path or the glob")
        for file in matches:
            name = os.path.realpath(file.name) if place is _Here else file.name
            files.setdefault(name, file)
    return list(files.values())


def names_below(folder: str) -> list[str] | None:
    """Lists the files in a folder and its folders, sorted, by their places in it.

    None: it is not a folder. Hidden files and folders are left out.
    """
    return _place_of(folder).below(folder)


class _Here:
    """Files of this machine."""

    @staticmethod
    def matching(pattern: str) -> list[CorpusFile]:
        path = os.path.expanduser(pattern)
        # A path that exists is never a glob: names may have brackets in them.
        if os.path.isfile(path):
            names = [path]
        else:
            matches = glob.glob(path, recursive=True)
            names = [name for name in sorted(matches) if os.path.isfile(name)]
        if not names and os.path.isdir(path):
            raise UserError(
                f"no file matches {pattern!r}, which is a folder: name the files "
                f"in it, as in {pattern}/*.txt"
            )
        return [_here(Path(name)) for name in names]

    @staticmethod
    def below(folder: str) -> list[str] | None:
        root = Path(folder).expanduser()
        if not root.is_dir():
            return None
        files = (file.relative_to(root) for file in root.rglob("*") if file.is_file())
        return sorted(file.as_posix() for file in files if _is_shown(file.parts))


class _Hub:
    """Files of the Hugging Face hub, which huggingface_hub copies into its cache."""

    @staticmethod
    def matching(pattern: str) -> list[CorpusFile]:
        system = _hub_files()
        matches = _answer(pattern, lambda: system.glob(pattern, detail=True))
        files = sorted(name for name in matches if matches[name]["type"] == "file")
        return [_on_hub(system, name, int(matches[name]["size"])) for name in files]

    @staticmethod
    def below(folder: str) -> list[str] | None:
        system = _hub_files()
        # huggingface_hub lists names without the scheme.
        root = folder.removeprefix(_HUB).rstrip("/")
        if _answer(folder, lambda: system.info(root))["type"] != "directory":
            return None
        matches = _answer(folder, lambda: system.find(root))
        names = (PurePosixPath(name[len(root) + 1 :]) for name in matches)
        return sorted(name.as_posix() for name in names if _is_shown(name.parts))


class _Stores:
    """Objects of stores, which are copied into the user's cache when they are read."""

    @staticmethod
    def matching(pattern: str) -> list[CorpusFile]:
        sign = re.search(r"[*?\[]", pattern)
        if sign is not None and not pattern.startswith("https://"):
            root = pattern[: sign.start()].rpartition("/")[0]
            matches = open_store(root).glob(pattern)
            return [_in_store(url, size) for url, size in matches.items()]
        # A web server cannot list files, so `*` in a URL is part of a file's name.
        size = open_store(pattern).size()
        return [] if size is None else [_in_store(pattern, size)]

    @staticmethod
    def below(folder: str) -> list[str] | None:
        # A web server lists no files.
        if folder.startswith("https://"):
            return None
        store = open_store(folder)
        # An object is not a folder; who may read it need not be allowed to list others.
        if store.size() is not None:
            return None
        names = (PurePosixPath(name) for name in store.sizes() if name)
        matches = sorted(name.as_posix() for name in names if _is_shown(name.parts))
        return matches or None


def null_in(where: str, field: str) -> str:
    """Returns the sentence for a row without text, alike in every format."""
    return f"{where} has null in {field!r}, it must hold a string: leave such rows out"


def _place_of(pattern: str) -> type[_Here] | type[_Hub] | type[_Stores]:
    if pattern.startswith(_HUB):
        return _Hub
    return _Here if "://" not in pattern else _Stores


def _here(file: Path) -> CorpusFile:
    if not os.access(file, os.R_OK):
        raise UserError(f"cannot read {file}: permission denied")
    return CorpusFile(
        name=str(file),
        size=file.stat().st_size,
        open=lambda: open(file, "rb"),
        local=lambda: file,
    )


def _in_store(url: str, size: int) -> CorpusFile:
    store = open_store(url)

    def local() -> Path:
        # Copy the file first: formats that seek would fetch each piece over the
        # network.
        return copy_of(store, "")

    return CorpusFile(
        name=url, size=size, open=lambda: open(local(), "rb"), local=local
    )


def _on_hub(system: Any, name: str, size: int) -> CorpusFile:
    # Resolve the repository, revision and path of a name only once.
    where = system.resolve_path(name)

    def local() -> Path:
        import huggingface_hub

        # Copy the file into the hub's cache: formats that seek would fetch each piece.
        copy = _answer(
            _HUB + name,
            lambda: huggingface_hub.hf_hub_download(
                where.repo_id,
                where.path_in_repo,
                repo_type=where.repo_type,
                revision=where.revision,
                endpoint=system.endpoint,
            ),
        )
        return Path(copy)

    return CorpusFile(
        name=_HUB + name,
        size=size,
        open=lambda: cast(IO[bytes], system.open(name, "rb")),
        local=local,
    )


def _hub_files() -> Any:
    # Imported late: reading local files needs no network library.
    import huggingface_hub

    return huggingface_hub.HfFileSystem()


def _answer(pattern: str, ask: Callable[[], Any]) -> Any:
    """Asks the Hub; what it or the network answers becomes one sentence."""
    with hub_errors(pattern):
        return ask()


def _is_shown(parts: tuple[str, ...]) -> bool:
    return not any(part.startswith(".") for part in parts)
