"""`recurjax bench WHAT [--json OUT]`: times passes."""

import difflib
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Annotated, Literal, cast

import tyro
from rich.console import Console

from recurjax.bench.report import show, write
from recurjax.bench.timing import Case
from recurjax.cli.options import parse, shows_usage
from recurjax.errors import UserError
from recurjax.ranges import PositiveInt, RangeChecks

BENCHES = {
    "transformer": "transformer",
    "recurrent_transformer": "recurrent_transformer",
    "recurrent_prefill": "ops:recurrent_prefill",
    "chunk_attention": "ops:chunk_attention",
    "gated_scan": "ops:gated_scan",
    "selective_scan": "ops:selective_scan",
    "rat": "rat",
    "latent_recurrent_transformer": "latent_recurrent_transformer",
    "recurformer": "recurformer",
    "relaxed_recursive_transformer": "relaxed_recursive_transformer",
    "trainer": "trainer",
    "data": "data",
    "generate": "generate",
    "machine": "machine",
}
"""What can be timed, and the `Case` that times it: a module of `recurjax.bench`; behind
a colon an entry of its table."""


USAGE = f"""usage: recurjax bench WHAT [options]

  recurjax bench transformer --json transformer.json

{fill("WHAT is one of " + ", ".join(BENCHES) + ".", 84)}
recurjax bench --help lists the options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench(RangeChecks):
    """Times a variant, an op, the trainer or the data pipeline, on the first device.

    Attributes:
      what: what to time. A variant; an op with each backend (`recurrent_prefill`,
        `chunk_attention`, `gated_scan`, `selective_scan`); `trainer`: the training loop
        compared with the bare step, and the data pipeline; `data`: a mixture of five
        parts compared with one corpus; `generate`: prefill and decode of the engine
        with a model of SmolLM2-135M's shape; `machine`: FLOP/s of matrix products and
        memory bandwidth, which bound the others.
      json: also write the rows to this file.
      large: use shapes for one accelerator instead of two CPU cores.
      dtype: dtype of activations and matrix products.
      repeats: timed calls of each program, after its warm-up.
    """

    what: Annotated[str, tyro.conf.Positional]
    json: Path | None = None
    large: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    repeats: PositiveInt = 10


def run(argv: list[str]) -> int:
    """Runs the command."""
    if shows_usage(argv, USAGE, help=False):
        return 0
    options = parse(Bench, argv, prog="recurjax bench")
    # Before an hour of measurements that could not be kept.
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json: there is no directory {options.json.parent}")
    if options.what not in BENCHES:
        near = difflib.get_close_matches(options.what, BENCHES, n=1)
        known = ", ".join(BENCHES)
        hint = f"did you mean {near[0]}?" if near else f"known: {known}"
        raise UserError(f"there is no bench {options.what!r}: {hint}")
    # Imported on demand: a bench imports its variant and jax.
    bench, measured = _load(BENCHES[options.what]), []
    for row in bench.rows(
        large=options.large, dtype=options.dtype, repeats=options.repeats
    ):
        # To standard error, row by row: the table comes at the end, which may be an
        # hour off.
        print(f"{row.name}: {row.median_ms:,.2f} ms", file=sys.stderr)
        measured.append(row)
        # What was measured survives a bench that is interrupted.
        if options.json is not None:
            write(measured, options.json)
    console = Console()
    # Into a file or a pipe the table gets a width that cuts no name.
    show(measured, console if console.is_terminal else Console(width=120))
    print(bench.summary(measured))
    return 0


def _load(name: str) -> Case:
    module, _, entry = name.partition(":")
    bench = import_module(f"recurjax.bench.{module}")
    return bench.BENCHES[entry] if entry else cast(Case, bench)
