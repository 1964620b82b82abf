"""Repositories of the Hugging Face Hub, through huggingface_hub and its cache.

huggingface_hub reads HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE, shows the
progress of downloads in a terminal, and keeps files in the cache that all programs of
this user share. A file appears there complete or not at all.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from recurjax.errors import UserError
from recurjax.files.atomic import sha256_of

_NAME = re.compile(r"([\w.-]+)/([\w.-]+?)(?:@([\w./+-]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """A model's repository at a branch, a tag or a commit.

    Attributes:
      owner: a user or an organization.
      name: name of the repository.
      revision: a branch, a tag or a commit.
    """

    owner: str
    name: str
    revision: str = "main"

    @property
    def id(self) -> str:
        """The name that the Hub knows it by: OWNER/NAME."""
        return f"{self.owner}/{self.name}"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit's full hash, which never changes."""
        return re.fullmatch("[0-9a-f]{40}", self.revision) is not None

    def __str__(self) -> str:
        return self.id if self.revision == "main" else f"{self.id}@{self.revision}"


def parse_repository(text: str) -> Repository | None:
    """Reads OWNER/NAME or OWNER/NAME@REVISION; None: the text is neither."""
    match = _NAME.fullmatch(text)
    # Names of folders, "." and "..", begin with a dot; no repository's owner does.
    if match is None or text.startswith("."):
        return None
    return Repository(owner=match[1], name=match[2], revision=match[3] or "main")


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A repository at one commit.

    Attributes:
      repository: where it is.
      hash: hash of the commit.
      files: the names of its files, and the SHA-256 of those that the Hub states.
      cache: the folder of the Hub's cache, where only that was looked at.
    """

    repository: Repository
    hash: str
    files: Mapping[str, str | None]
    cache: Path | None = None

    def fetch(self, names: Collection[str]) -> Path:
        """Returns a folder with these files, fetched unless the Hub's cache has them.

        Raises:
          UserError: the download fails, or a file is not what the Hub states.
        """
        if self.cache is not None:
            return self.cache
        import huggingface_hub

        with hub_errors(str(self.repository)):
            folder = huggingface_hub.snapshot_download(
                self.repository.id,
                revision=self.repository.revision,
                allow_patterns=list(names),
            )
        folder = Path(folder)
        if folder.name != self.hash:
            raise UserError(
                f"{self.repository} got a new commit during the download: run the "
                "command again"
            )
        for name in names:
            self._verify(folder / name, self.files[name])
        return folder

    def _verify(self, file: Path, sha256: str | None) -> None:
        if sha256 is None or sha256_of(file) == sha256:
            return
        # Out of the cache, or the next download would find the same file there.
        for path in (Path(os.path.realpath(file)), file):
            path.unlink(missing_ok=True)
        raise UserError(
            f"{self.repository}: {file.name} has another SHA-256 than the Hub "
            "states and is removed from the Hub's cache: run the command "
            "again"
        )


def find_commit(
    repository: Repository, *, report: Callable[[str], None] = print
) -> Commit:
    """Fetches a revision's commit and its files from the Hub.

    Offline, or where the Hub does not answer, the Hub's cache says which commit the
    revision was when it was last fetched.

    Args:
      report: called with a message if the Hub does not answer and the cache is used.

    Raises:
      UserError: the repository or the revision is missing, private or gated; or the
        Hub cannot be reached and its cache has no copy.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return _cached_commit(repository, "HF_HUB_OFFLINE is set")
    try:
        with hub_errors(str(repository)):
            info = huggingface_hub.HfApi().model_info(
                repository.id, revision=repository.revision, files_metadata=True
            )
    except UserError as error:
        cause = error.__cause__
        # What the Hub answers counts. Only without an answer is there the cache.
        if isinstance(cause, errors.HfHubHTTPError | errors.HFValidationError):
            raise
        with suppress(UserError):
            cached = _cached_commit(repository, "")
            report(
                f"{error}; the copy of commit {cached.hash[:12]} in its cache is used"
            )
            return cached
        raise
    files = {
        file.rfilename: None if file.lfs is None else file.lfs.sha256
        for file in info.siblings or []
    }
    return Commit(repository=repository, hash=str(info.sha), files=files)


def _cached_commit(repository: Repository, why: str) -> Commit:
    import huggingface_hub
    from huggingface_hub import constants

    try:
        folder = huggingface_hub.snapshot_download(
            repository.id,
            revision=repository.revision,
            local_files_only=True,
            allow_patterns=["config.json"],
        )
    except FileNotFoundError as error:
        raise UserError(
            f"{why} and {repository} is not in the Hub's cache at "
            f"{constants.HF_HUB_CACHE}: fetch it once with the network on"
        ) from error
    files = {path.name: None for path in Path(folder).iterdir()}
    return Commit(
        repository=repository,
        hash=Path(folder).name,
        files=files,
        cache=Path(folder),
    )


@contextmanager
def hub_errors(where: str) -> Iterator[None]:
    """Turns what the Hub or the network answers into one sentence.

    Args:
      where: the repository or the pattern of files, as the user named it.

    Raises:
      UserError: anything went wrong; its cause is the error of huggingface_hub.
    """
    try:
        with _quiet():
            yield
    except UserError:
        raise
    except Exception as error:  # HTTP and network errors of several libraries
        raise UserError(_sentence(where, error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps huggingface_hub from logging what it raises, and progress out of files."""
    from huggingface_hub import utils

    logger = logging.getLogger("huggingface_hub")
    level, bars = logger.level, not utils.are_progress_bars_disabled()
    # A user who sets the variable wants its messages.
    if "HF_HUB_VERBOSITY" not in os.environ:
        logger.setLevel(logging.CRITICAL)
    if bars and not sys.stderr.isatty():
        utils.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            utils.enable_progress_bars()


def _sentence(where: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{where} is gated: accept its terms on {constants.ENDPOINT}, then set "
            "HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{where}: the Hub has no such repository, or hides it: check the "
            "name, or set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{where}: the repository has no such revision: name a branch, a tag or a "
            "commit's full hash"
        )
    if isinstance(error, errors.HFValidationError):
        return f"{where} is not a name on the Hub: use OWNER/NAME"
    if status in (401, 403):
        return (
            f"{where}: the Hub refuses the token in use: set HF_TOKEN to a "
            "valid token with the permission"
        )
    no_answer = isinstance(error, errors.LocalEntryNotFoundError)
    if isinstance(error, FileNotFoundError) and not no_answer:
        return (
            f"{where}: the Hub has no such file: check the name, or set "
            "HF_TOKEN to a token that may read it"
        )
    # What went wrong first: the look at the cache, or the upload, failed because of it.
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, errors.HfHubHTTPError):
        cause = cause.__cause__
    text = getattr(cause, "server_message", None) or str(cause)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    message = lines[0].rstrip(".") if lines else type(cause).__name__
    return f"{where}: the Hub at {constants.ENDPOINT} cannot be used: {message}"
