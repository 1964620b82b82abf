"""`recurjax card`: the model card of a run."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from recurjax.cli.options import parse, shows_usage
from recurjax.convert.card import model_card
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import read_json_object
from recurjax.ranges import NonNegativeInt, RangeChecks
from recurjax.training.run import load_run

USAGE = """usage: recurjax card RUN --license LICENSE [options]

  recurjax card runs/quickstart --license apache-2.0 --out card.md

Prints the model card of a run, as recurjax push sends it.
recurjax card --help lists the options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardOptions(RangeChecks):
    """Prints the model card of a run: Markdown, with the metadata that the Hub reads.

    Attributes:
      run: the run directory.
      license: license of the weights, as the Hub names it: apache-2.0, mit, other, ...
      repository: repository in the card's examples; None: OWNER and the run's name.
      parity: parity.json of an export of this run, whose figures go into the card.
      out: write to this file instead of standard output.
      step: training step of the checkpoint; None: the newest.
    """

    run: Annotated[Path, tyro.conf.Positional]
    license: str
    repository: str | None = None
    parity: Path | None = None
    out: Path | None = None
    step: NonNegativeInt | None = None


def run(argv: list[str]) -> int:
    """Runs `recurjax card ARGV` and returns its exit code.

    Raises:
      UserError: a mistake that the user can correct.
    """
    if shows_usage(argv, USAGE, help=False):
        return 0
    options = parse(CardOptions, argv, prog="recurjax card")
    loaded = load_run(options.run, step=options.step, report=_report)
    card = model_card(
        loaded,
        options.run,
        license=options.license,
        repository=options.repository or f"OWNER/{options.run.resolve().name}",
        parity=(
            {}
            if options.parity is None
            else read_json_object(options.parity, "the comparison with PyTorch")
        ),
    )
    if options.out is None:
        print(card, end="")
    else:
        write_atomic(options.out, card)
    return 0


def _report(text: str) -> None:
    print(text, file=sys.stderr)
