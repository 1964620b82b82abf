"""Stores: buckets at gs://... and s3://..., web servers at https://...

fsspec opens each kind of store through its own package. `Store` has every operation
that the library uses: list the objects below a folder, read, write and remove entire
objects. All object stores share these; none has atomic renames, links or appending.

`copy_of` keeps copies of objects in the user's cache and fetches each once: its name
there is a digest of its URL and of what the store says of its content, so that an
object which was replaced is fetched again. Several processes may fetch the same object
at once, because each copy appears atomically. The cache has no largest size: all of it
may be removed at any time.
"""

import atexit
import hashlib
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import IO, Any, TypeVar

from recurjax.errors import UserError
from recurjax.files.atomic import refuse_nul, sha256_of
from recurjax.machine import caches

T = TypeVar("T")

_CREDENTIALS = {
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth "
    "application-default login`",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
}
_CREDENTIALS_PLACES = {
    "gs": (
        ("GOOGLE_APPLICATION_CREDENTIALS", "FSSPEC_GS_TOKEN"),
        "~/.config/gcloud/application_default_credentials.json",
    ),
    "s3": (
        ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ROLE_ARN"),
        "~/.aws/credentials",
    ),
}
"""Variables and the file that a user may have set; a cloud's machines need neither."""
_WRITABLE = {"gs": "gcsfs", "s3": "s3fs", "memory": None}
_READABLE = {**_WRITABLE, "https": "aiohttp"}
_EXTRA = {"gs": "cloud", "https": "cloud", "s3": "s3"}
_STAMPS = ("size", "etag", "ETag", "generation", "md5Hash", "mtime", "updated")
_STAMPS += ("LastModified", "Last-Modified", "created")
_WORDS = ("credential", "anonymous", "401", "403", "forbidden", "denied", "unauthor")


def url_of(path: str | Path) -> str | None:
    """Returns the URL of a path, None for a local path.

    A `Path` made of a URL has lost one of its slashes; it gets it back.
    """
    # `Path("gs://b/x")` is gs:/b/x: any number of slashes is taken.
    match = re.match(r"([a-z][a-z0-9+.-]+):/+(?=[^/])", str(path))
    return None if match is None else f"{match[1]}://{str(path)[match.end() :]}"


def open_store(url: str, *, write: bool = False) -> "Store":
    """Opens the folder of a store, and asks for nothing yet.

    Raises:
      UserError: no store of that scheme is known, it cannot be written, or its package
        is not installed.
    """
    scheme = url.partition("://")[0]
    known = _WRITABLE if write else _READABLE
    if scheme not in known:
        what = "written" if write else "read"
        names = ", ".join(f"{name}://" for name in known if name != "memory")
        raise UserError(
            f"{url}: nothing can be {what} at {scheme}://, only at {names} and on "
            "file systems of this machine"
        )
    # Imported here: most runs never see a bucket, and the import takes a while.
    import fsspec

    # They also print tracebacks of errors that they raise, which we report in a
    # sentence. A user who enabled their messages keeps them.
    for name in ("gcsfs", "google.auth"):
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    try:
        # Listings are not cached, because other processes write there too.
        system = fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        raise UserError(
            f"{scheme}:// needs {known[scheme]}: "
            f"pip install 'recurjax[{_EXTRA[scheme]}]'"
        ) from error
    except Exception as error:  # of each store's own classes
        raise _user_error(url, error) from error
    return Store(url=url.rstrip("/"), system=system)


@dataclass
class RequestCount:
    """Counts a store's requests; several threads may count at once.

    A request is a call of fsspec's, which sends one over the network, or several for a
    large object.
    """

    total: int = 0
    _counting: Lock = field(default_factory=Lock)

    def count(self) -> None:
        with self._counting:
            self.total += 1


@dataclass(frozen=True, kw_only=True)
class Store:
    """The objects below one URL, by their names relative to it.

    Attributes:
      url: without a slash at its end.
      system: fsspec's.
      requests: made so far.
    """

    url: str
    system: Any
    requests: RequestCount = field(default_factory=RequestCount)

    def sizes(self) -> dict[str, int]:
        """Lists every object below the URL with its size in bytes.

        The name of the URL's own object is "". The markers of empty folders, whose
        names end in a slash, are left out.

        Raises:
          UserError: the store cannot be listed, as no web server can, or an object's
            name would lead out of a folder that it is copied to.
        """
        if self.url.startswith("https://"):
            raise UserError(
                f"{self.url}: a web server lists no files, so https:// cannot name "
                "a folder: copy it to this machine or to a bucket"
            )
        root = self._inner("").rstrip("/")
        listed = self._ask(lambda: self.system.find(root, detail=True))
        sizes = {
            # Stores answer with the bucket in front, some with a slash; names here are
            # relative.
            name.removeprefix("/")[len(root.removeprefix("/")) + 1 :]: int(info["size"])
            for name, info in listed.items()
            if info["type"] == "file"
        }
        names = {n: s for n, s in sizes.items() if s or not n.endswith("/")}
        for name in names:
            if name and not _is_inside(name):
                raise UserError(
                    f"{self.url} has an object named {name[:200]!r}, whose path leaves "
                    "the folder that it is copied to: rename or remove the object"
                )
        return names

    def read(self, name: str) -> bytes:
        return self._ask(lambda: self.system.cat_file(self._inner(name)))

    def fetch(self, name: str, file: Path) -> None:
        """Copies an object into a file, whose folder is made."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._ask(lambda: self.system.get_file(self._inner(name), str(file)))

    def send(self, file: Path, name: str) -> None:
        """Copies a file into an object, which appears complete or not at all."""
        self._ask(lambda: self.system.put_file(str(file), self._inner(name)))

    def write(self, name: str, content: bytes) -> None:
        self._ask(lambda: self.system.pipe_file(self._inner(name), content))

    def touch(self, name: str) -> None:
        """Writes an object again, which changes its stamp."""
        self.write(name, self.read(name))

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects, one after another."""
        for name in names:
            self._ask(lambda name=name: self.system.rm_file(self._inner(name)))

    def glob(self, pattern: str) -> dict[str, int]:
        """Lists the objects of a URL with `*` and `**`, as URLs with their sizes."""
        # fsspec's own way to take the scheme off, different for each store.
        inner = self.system._strip_protocol(pattern)
        matches = self._ask(lambda: self.system.glob(inner, detail=True))
        for name in matches:
            # Of the rest only the last part becomes a file's name.
            refuse_nul(name, f"rename or remove the object, which is in {pattern}")
        return {
            self.system.unstrip_protocol(name): int(info.get("size") or 0)
            for name, info in sorted(matches.items())
            if info["type"] == "file"
        }

    def open(self, name: str) -> IO[bytes]:
        return self._ask(lambda: self.system.open(self._inner(name), "rb"))

    def sha256(self, name: str) -> str:
        """Reads an object through and returns its checksum, in hexadecimal."""

        def digest() -> str:
            with self.system.open(self._inner(name), "rb") as opened:
                return hashlib.file_digest(opened, "sha256").hexdigest()

        return self._ask(digest)

    def size(self, name: str = "") -> int | None:
        """Returns an object's size in bytes; None: there is no such object."""
        self.requests.count()
        try:
            info = self.system.info(self._inner(name))
        except FileNotFoundError as error:
            if (behind := _behind_not_found(error)) is not None:
                raise _user_error(self.url, behind) from error
            return None
        except Exception as error:  # of each store's own classes
            raise _user_error(self.url, error) from error
        return int(info.get("size") or 0) if info["type"] == "file" else None

    def stamp(self, name: str) -> str:
        """Returns what changes when an object is replaced, as the store tells it."""
        info = self._ask(lambda: self.system.info(self._inner(name)))
        return repr([(key, str(info[key])) for key in _STAMPS if key in info])

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless there is one; of several who try one succeeds."""
        inner = self._inner(name)
        self.requests.count()
        try:
            self.system.pipe_file(inner, content, mode="create")
        except FileExistsError:
            return False
        except Exception as error:  # of each store's own classes
            if self.size(name) is not None:
                return False
            raise _user_error(self.url, error) from error
        return True

    def check_writable(self) -> None:
        """Writes a small object and removes it.

        Raises:
          UserError: no credentials, no permission, no such bucket, no network.
        """
        self.write(".recurjax-writes-here", b"")
        self.remove([".recurjax-writes-here"])

    def _inner(self, name: str) -> str:
        path = f"{self.url}/{name}" if name else self.url
        return self.system._strip_protocol(path)

    def _ask(self, ask: Callable[[], T]) -> T:
        self.requests.count()
        try:
            return ask()
        except Exception as error:  # of each store's own classes
            raise _user_error(self.url, error) from error


_FOLDER = "stores"
_temporary: list[Path] = []


def cache_folder() -> Path:
    """Returns the folder of all copies: `$RECURJAX_CACHE/stores`.

    By default it is in the user's cache folder. An empty variable means a folder that
    is removed when the process ends.
    """
    cache = caches.cache_folder()
    if cache is not None:
        return cache / _FOLDER
    if not _temporary:
        _temporary.append(Path(tempfile.mkdtemp(prefix="recurjax-stores-")))
        atexit.register(shutil.rmtree, _temporary[0], ignore_errors=True)
    return _temporary[0]


def copy_of(store: Store, name: str, *, sha256: str | None = None) -> Path:
    """Returns a copy of an object as a file of this machine, fetched at most once.

    Args:
      store: the store that holds it.
      name: name of the object, relative to the store's URL; "" for the URL itself.
      sha256: required checksum of the content; None: any.

    Raises:
      UserError: no such object, other content, or the cache cannot be written.
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
    """Returns a copy as `copy_of`, which is read through and fetched again if damaged.

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
    """Reads an object through in its store, whatever copies there are.

    Raises:
      UserError: it is not there, or it is other content.
    """
    if store.sha256(name) != sha256:
        raise _damaged(f"{store.url}/{name}")


def folder_for(url: str, content: str) -> Path:
    """Names a folder of the cache for the content of a URL."""
    digest = hashlib.sha256(f"{url}\n{content}".encode()).hexdigest()
    return cache_folder() / digest[:32]


@contextmanager
def sent_folder(url: str, *, last: str) -> Iterator[Path]:
    """Gives a folder of this machine that is sent to a store when the block ends well.

    The folder is in the cache and the same for each call with this URL, so that work
    which was stopped continues. If the block raises, nothing is sent, and the folder
    stays until the next call. If sending fails, the objects that were sent are removed.

    Args:
      url: URL of the new folder, which must hold no object.
      last: the file that is sent last and so marks the others as complete.

    Raises:
      UserError: objects are there already, or the store cannot be written.
    """
    store = open_store(url, write=True)
    store.check_writable()
    if store.sizes():
        raise UserError(f"{url} exists already: choose another place or remove it")
    folder = folder_for(url, "sent") / (PurePosixPath(url).name or "folder")
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
      UserError: nothing is there, or it cannot be read.
    """
    store = open_store(url)
    names = store.sizes()
    if not names:
        raise UserError(f"{url}: there is no such object or folder: check the URL")
    with tempfile.TemporaryDirectory(prefix="recurjax-copy-") as temporary:
        root = Path(temporary) / (PurePosixPath(url).name or "folder")
        for name in names:
            store.fetch(name, root / name if name else root)
        yield root


def _copy(url: str, key: str) -> Path:
    return folder_for(url, key) / PurePosixPath(url).name


def _damaged(url: str) -> UserError:
    return UserError(
        f"{url} is damaged, because its checksum differs from the recorded "
        "one: upload it again"
    )


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{folder} cannot be written: {error.strerror or error}; name another folder "
        f"in ${caches.VARIABLE}"
    )


def _is_inside(name: str) -> bool:
    """Whether an object's name stays below the folder that it is joined to."""
    parts = name.split("/")  # a leading slash makes the first part empty
    return not ({"", ".", ".."} & {*parts} or "\0" in name or "\\" in name)


def _behind_not_found(error: FileNotFoundError) -> Exception | None:
    """Returns why a web server gave no answer; None: the file does not exist.

    fsspec calls every failure to ask over https:// a missing file.
    """
    cause = error.__cause__
    # aiohttp's answers of a server have a status, all other failures have none.
    if not isinstance(cause, Exception) or not _is_of_the_web(cause):
        return None
    return None if getattr(cause, "status", None) in (404, 410) else cause


def _is_of_the_web(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "aiohttp"


def _user_error(url: str, error: Exception) -> UserError:
    if isinstance(error, FileNotFoundError):
        error = _behind_not_found(error) or error
    text = " ".join(str(error).split()) or type(error).__name__
    message = f"{type(error).__name__} {text}".lower()
    scheme = url.partition("://")[0]
    if "certificate_verify_failed" in message or "certificateerror" in message:
        why = re.search(r"verify failed: ([^(\]]+)", text)
        return UserError(
            f"{url}: the server's certificate is not one that this machine trusts "
            f"({(why[1] if why else text[:160]).strip()}): name the file of its "
            "authority's certificates in $SSL_CERT_FILE, or copy the file here"
        )
    # Each store has its own class for this; words of the message are what they share.
    if scheme in _CREDENTIALS and any(word in message for word in _WORDS):
        return UserError(
            f"{url} cannot be used without credentials that may: "
            f"{_CREDENTIALS[scheme]} ({text[:160]})"
        )
    if isinstance(error, FileNotFoundError):
        return UserError(f"{url}: there is no such bucket or object ({text[:160]})")
    # Without credentials the store's package asks a cloud machine's metadata server,
    # and elsewhere its error is about that server.
    bare = ""
    if _lacks_credentials(scheme):
        bare = f"; no credentials are set here either: {_CREDENTIALS[scheme]}"
    return UserError(f"{url} cannot be used: {text[:240]}{bare}")


def _lacks_credentials(scheme: str) -> bool:
    if scheme not in _CREDENTIALS_PLACES:
        return False
    variables, file = _CREDENTIALS_PLACES[scheme]
    in_environment = any(os.environ.get(name) for name in variables)
    return not in_environment and not Path(file).expanduser().is_file()
