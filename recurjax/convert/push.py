"""A run's export and its card onto the Hugging Face Hub: one commit or nothing."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from recurjax.convert.card import CARD, LOSS_PICTURE, check_license, model_card
from recurjax.convert.formats.safetensors_files import INDEX, SINGLE
from recurjax.convert.torch import to_torch
from recurjax.errors import UserError
from recurjax.evaluation.rows import FILE as EVALUATIONS
from recurjax.files.hub import Repository, hub_errors
from recurjax.files.json_files import read_json_object
from recurjax.training.run import RunDirectory, load_run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """The files that a push sent, or would send.

    Attributes:
      files: names and sizes in bytes.
      url: URL of the commit; None after a dry run.
    """

    files: dict[str, int]
    url: str | None


def push(
    root: Path,
    repository: Repository,
    *,
    license: str,
    private: bool = False,
    dry_run: bool = False,
    step: int | None = None,
    check: bool = True,
    python: str | None = None,
    report: Callable[[str], None] = print,
) -> Pushed:
    """Sends a run's model to the Hub, in the form that all three libraries load.

    The repository gets what `recurjax convert to-torch` writes, the card, the picture
    of the losses and the evaluations. `from_hub` makes the run of it again, bit for
    bit; the optimizer's state stays here. Files of an earlier push are replaced,
    weights of another layout removed, and what else is there stays.

    Args:
      root: the run directory.
      repository: where; its revision is the branch.
      license: see `check_license`.
      private: whether a repository that this creates is private.
      dry_run: write everything aside, and send nothing.
      step: step of the checkpoint; None: the newest.
      check, python: see `to_torch`.
      report: called with messages for the user.

    Raises:
      UserError: the run or the licence is wrong, PyTorch differs, or the Hub does not
        take the commit: then it is as it was, and a repository or branch that this call
        made is gone again.
    """
    check_license(license)
    if repository.is_commit:
        raise UserError(f"{repository}: --revision must be a branch, not a commit")
    if not dry_run:
        _check_token(repository)
    run = load_run(root, step=step, report=report)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "export"
        parity = to_torch(run, out, check=check, python=python)
        if not parity.within_tolerance:
            raise UserError(
                f"{root} is not pushed, because PyTorch differs from JAX: "
                f"{parity.sentence()}"
            )
        card = model_card(
            run,
            root,
            license=license,
            repository=repository.id,
            parity=read_json_object(out / "parity.json", "the comparison"),
        )
        (out / CARD).write_text(card, encoding="utf-8")
        picture = RunDirectory(root).loss_plot
        for source, name in (
            (picture, LOSS_PICTURE),
            (root / EVALUATIONS, EVALUATIONS),
        ):
            if source.is_file():
                shutil.copyfile(source, out / name)
        files = {p.relative_to(out).as_posix(): p for p in sorted(out.rglob("*"))}
        sizes = {name: p.stat().st_size for name, p in files.items() if p.is_file()}
        if dry_run:
            return Pushed(files=sizes, url=None)
        message = f"{Path(root).resolve().name}, step {run.step}, by recurjax"
        paths = {name: files[name] for name in sizes}
        return Pushed(files=sizes, url=_commit(repository, paths, message, private))


def _check_token(repository: Repository) -> None:
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError(f"{repository}: HF_HUB_OFFLINE is set: unset it to push")
    if huggingface_hub.get_token() is None:
        raise UserError(
            f"{repository}: pushing needs a token with write permission: set HF_TOKEN"
        )


def _commit(
    repository: Repository, files: dict[str, Path], message: str, private: bool
) -> str:
    import huggingface_hub

    api, id, branch = huggingface_hub.HfApi(), repository.id, repository.revision
    with hub_errors(str(repository)), _target(repository, private):
        there = api.list_repo_files(id, revision=branch)
        # Weights of another layout would be read instead of these.
        stale = [
            name
            for name in there
            if name not in files
            and (name == INDEX or (name.startswith("model-") and "-of-" in name))
            and SINGLE in files
        ]
        commit = api.create_commit(
            id,
            [
                *(huggingface_hub.CommitOperationDelete(name) for name in stale),
                *(
                    huggingface_hub.CommitOperationAdd(name, str(path))
                    for name, path in files.items()
                ),
            ],
            commit_message=message,
            revision=branch,
        )
        return commit.commit_url


@contextmanager
def _target(repository: Repository, private: bool) -> Iterator[None]:
    """Makes the repository and the branch; takes back what is new if an error follows.

    Raises:
      UserError: the repository is public and should be private.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    api, id, branch = huggingface_hub.HfApi(), repository.id, repository.revision
    is_new = True
    try:
        # None: an organization may have made private the default.
        api.create_repo(id, private=private or None)
    except HfHubHTTPError as error:
        if getattr(error.response, "status_code", None) != 409:  # it exists
            raise
        is_new = False
        if private and not api.model_info(id).private:
            raise UserError(
                f"{id} exists and is public: make it private in its settings, or leave "
                "out --private"
            ) from error
    new_branch = False
    try:
        if branch != "main":
            branches = [ref.name for ref in api.list_repo_refs(id).branches]
            if branch not in branches:
                api.create_branch(id, branch=branch)
                new_branch = True
        yield
    except BaseException as error:
        try:
            if is_new:
                api.delete_repo(id)
            elif new_branch:
                api.delete_branch(id, branch=branch)
        except Exception:
            what = f"the branch {branch}" if new_branch else "the repository"
            raise UserError(
                f"{id}: the push failed, and {what} created for it could not be "
                "removed: remove it in the settings of the repository"
            ) from error
        raise
