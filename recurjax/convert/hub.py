"""Models of the Hugging Face Hub: a checkpoint's files, a run directory made of them.

Of a repository only the files that are read are fetched: config.json, safetensors and
what says something about text. Nothing of it is executed and no pickle is read. The run
directory is kept in the user's cache under the commit and the version of recurjax, so
that a second start neither downloads nor converts.
"""

import fnmatch
from collections.abc import Callable, Collection
from pathlib import Path

from recurjax.convert.formats.safetensors_files import INDEX, SINGLE
from recurjax.errors import UserError
from recurjax.files.hub import Repository, find_commit, parse_repository
from recurjax.machine import caches
from recurjax.training.run import LoadedRun, RunDirectory, load_run
from recurjax.version import VERSION

PREFIX = "hf:"
_TEXT = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json"),
    # Of runs of ours that no tokenizer.json describes.
    *("byte_tokenizer.json", "symbols.json"),
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def from_hub(
    name: str, *, step: int | None = None, report: Callable[[str], None] = print
) -> LoadedRun:
    """Loads a model of the Hub: OWNER/NAME or OWNER/NAME@REVISION.

    Args:
      name: name of the repository, at a branch, a tag or a commit; of main without one.
      step: step of the run's checkpoint; None: the newest.
      report: called with messages for the user.

    Raises:
      UserError: see `imported_run`.
    """
    path = Path(f"{PREFIX}{name.removeprefix(PREFIX)}")
    return load_run(imported_run(path, report=report), step=step, report=report)


def imported_run(path: Path, *, report: Callable[[str], None] = print) -> Path:
    """Returns the run directory of `hf:OWNER/NAME[@REVISION]`; another path unchanged.

    A repository that `recurjax push` wrote becomes the run that was pushed, bit for
    bit; any other is read as a Hugging Face checkpoint.

    Args:
      report: called with messages for the user.

    Raises:
      UserError: the name is wrong, the Hub or its cache does not have the model, or
        recurjax cannot read it.
    """
    if not str(path).startswith(PREFIX):
        return path
    repository = _repository(path)
    cache = caches.cache_folder()
    if cache is None:
        raise UserError(
            f"{path} needs a cache to import into, and {caches.VARIABLE} is "
            "empty: unset it, name a folder, or use recurjax convert from-hf"
        )

    def place(commit: str) -> Path:
        # The last part is the run's name, by which a server's clients know the model.
        folder = cache / "hub" / VERSION / repository.owner / commit
        return folder / repository.name

    if repository.is_commit and RunDirectory(place(repository.revision)).is_claimed:
        return place(repository.revision)
    commit = find_commit(repository, report=report)
    out = place(commit.hash)
    if RunDirectory(out).is_claimed:
        return out
    checkpoint = commit.fetch(needed_files(repository, commit.files))
    try:
        _import(checkpoint, out, report)
    except UserError:
        # Another process may have imported the same commit at the same time.
        if not RunDirectory(out).is_claimed:
            raise
    report(f"{repository} was imported into {out}")
    return out


def fetched_checkpoint(path: Path, *, report: Callable[[str], None] = print) -> Path:
    """Returns the folder of a checkpoint that may be on the Hub.

    Args:
      path: `hf:OWNER/NAME[@REVISION]`; or the same without `hf:`, where there is no
        such path on this machine. Any other path is returned unchanged.
      report: called with a message if the Hub does not answer and its cache is used.

    Raises:
      UserError: see `imported_run`.
    """
    if str(path).startswith(PREFIX):
        repository = _repository(path)
    else:
        repository = None if path.exists() else parse_repository(str(path))
    if repository is None:
        return path
    commit = find_commit(repository, report=report)
    return commit.fetch(needed_files(repository, commit.files))


def needed_files(repository: Repository, names: Collection[str]) -> list[str]:
    """Returns which files of a repository a conversion reads.

    Raises:
      UserError: it has no config.json, or no weights in safetensors.
    """
    weights = [SINGLE] if SINGLE in names else []
    if INDEX in names:
        # The index names its shards; all that are named as shards are fetched.
        weights = [INDEX, *fnmatch.filter(names, "model*-of-*.safetensors")]
    if not weights:
        raise UserError(f"{repository} has no {SINGLE}: {_instead(names)}")
    if "config.json" not in names:
        raise UserError(
            f"{repository} has no config.json: recurjax reads repositories in the "
            "layout of transformers"
        )
    text = [name for name in _TEXT if name in names]
    return ["config.json", *text, *weights]


def _instead(names: Collection[str]) -> str:
    """Returns what a repository without safetensors has, and what to do."""

    def first(*patterns: str) -> str | None:
        matches = [n for p in patterns for n in fnmatch.filter(names, p)]
        return min(matches, default=None)

    if gguf := first("*.gguf"):
        return (
            f"download one of its GGUF files ({gguf}) and name the file: recurjax "
            f"convert from-hf {gguf} RUN"
        )
    if pickle := first(*_PICKLES):
        return (
            f"its weights are pickles ({pickle}), which may run code and are never "
            "read: name a revision or a copy that has safetensors"
        )
    return "it holds no weights that recurjax reads (safetensors)"


def _repository(path: Path) -> Repository:
    repository = parse_repository(str(path).removeprefix(PREFIX))
    if repository is None:
        raise UserError(
            f"{path} is not a repository: use hf:OWNER/NAME or hf:OWNER/NAME@REVISION"
        )
    return repository


def _import(checkpoint: Path, out: Path, report: Callable[[str], None]) -> None:
    # Imported here: every command that reads a run may name one on the Hub, and few do.
    from recurjax.convert.hugging_face import from_hf
    from recurjax.convert.hugging_face.keys import read_keys
    from recurjax.convert.imported_run import new_experiment, write_run
    from recurjax.convert.parity import NotMeasured
    from recurjax.convert.torch import from_torch
    from recurjax.convert.torch.export import FORMAT

    parity = NotMeasured(reason="not asked for").to_json()
    if read_keys(checkpoint / "config.json").get("format") == FORMAT:
        run = from_torch(checkpoint, report=report)
        write_run(
            out, run.model, run.experiment, run.tokenizer, step=run.step, parity=parity
        )
        return
    imported = from_hf(checkpoint, report=report)
    if imported.tokenizer is None:
        raise UserError(
            f"{checkpoint} has no tokenizer.json: import it with recurjax "
            "convert from-hf --tokenizer FILE"
        )
    experiment = new_experiment(out, imported.model.config, length=imported.length)
    write_run(out, imported.model, experiment, imported.tokenizer, parity=parity)
