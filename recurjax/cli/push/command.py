"""`recurjax push`: a run's model with its card onto the Hugging Face Hub."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from recurjax.cli.options import parse, shows_usage
from recurjax.convert.push import push
from recurjax.errors import UserError
from recurjax.files.hub import Repository, parse_repository
from recurjax.ranges import NonNegativeInt, RangeChecks

USAGE = """usage: recurjax push RUN OWNER/NAME --license LICENSE [options]

  recurjax push runs/quickstart me/quickstart --license apache-2.0 --dry-run

Sends a run's model to the Hugging Face Hub, with its card, for JAX, PyTorch and
transformers. recurjax push --help lists the options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PushOptions(RangeChecks):
    """Sends a run's model to the Hugging Face Hub: one commit, or nothing.

    Attributes:
      run: the run directory.
      repository: OWNER/NAME; created if it does not exist.
      license: license of the weights, as the Hub names it: apache-2.0, mit, other, ...
      private: create a new repository as private.
      revision: the branch; created if it does not exist.
      dry_run: list what would be sent and send nothing.
      step: training step of the checkpoint; None: the newest.
      check: compare the export with JAX, if torch is installed; the figures go into the
        card, and a difference ends the command.
      torch_python: an interpreter with torch; None: this one.
    """

    run: Annotated[Path, tyro.conf.Positional]
    repository: Annotated[str, tyro.conf.Positional]
    license: str
    private: bool = False
    revision: str = "main"
    dry_run: bool = False
    step: NonNegativeInt | None = None
    check: bool = True
    torch_python: str | None = None


def run(argv: list[str]) -> int:
    """Runs `recurjax push ARGV` and returns its exit code.

    Raises:
      UserError: a mistake that the user can correct.
    """
    if shows_usage(argv, USAGE, help=False):
        return 0
    options = parse(PushOptions, argv, prog="recurjax push")
    pushed = push(
        options.run,
        _repository(options.repository, options.revision),
        license=options.license,
        private=options.private,
        dry_run=options.dry_run,
        step=options.step,
        check=options.check,
        python=options.torch_python,
        report=_report,
    )
    for name, size in pushed.files.items():
        print(f"{size:>15,}  {name}")
    if pushed.url is None:
        print(f"nothing was sent to {options.repository}")
    else:
        print(pushed.url)
    return 0


def _repository(name: str, revision: str) -> Repository:
    repository = parse_repository(f"{name.removeprefix('hf:')}@{revision}")
    if repository is None or "@" in name:
        raise UserError(
            f"{name!r} is not a repository: use OWNER/NAME, and --revision for a branch"
        )
    return repository


def _report(text: str) -> None:
    print(text, file=sys.stderr)
