"""Plain PyTorch attention (SDPA) beside `recurjax bench rat`'s layer, in one run.

x + attention(rmsnorm(x)) with the same weights on both sides, float32, on CPU: forward,
forward and backward, and one token after T - 1. Processes take turns, so that a ratio
comes from one machine at one load; each figure is the fastest of all turns. RAT(16) and
the RNN are timed as well. Expect attention within twice SDPA's time.

    python experiments/rat/torch_layers.py --torch-python PYTHON

PYTHON is an interpreter that has torch and numpy.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recurjax.bench import rat
from recurjax.bench.torch_peer import Times, best_of_turns
from recurjax.cli.options import parse
from recurjax.errors import UserError
from recurjax.machine import host
from recurjax.parameters import to_nested_dict
from recurjax.types import Tokens

LAYERS = ("attention", "rat16", "rnn")
PASSES = ("forward", "forward_backward", "decode")
THEIRS = "sdpa"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Times both sides in turns.

    Attributes:
      torch_python: an interpreter that has torch and numpy.
      lengths: T.
      batch: B.
      width: D.
      heads: H.
      turns: how often each side runs.
      repeats: timed calls of each program in a turn.
      threads: of torch.
    """

    torch_python: str
    lengths: tuple[int, ...] = (4096,)
    batch: int = 1
    width: int = rat.SMALL["D"]
    heads: int = rat.SMALL["H"]
    turns: int = 3
    repeats: int = 5
    threads: int = 2

    def __post_init__(self):
        sizes = (self.batch, self.turns, self.repeats, self.threads, *self.lengths)
        if not self.lengths or min(sizes) < 1:
            raise UserError("all sizes must be at least 1, with at least one of them")
        if self.width % (2 * self.heads):
            raise UserError("--width must be a multiple of twice --heads")


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints a table for each length."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="torch_layers.py")
    best = best_of_turns(
        THEIRS,
        partial(case, options),
        partial(ours, options),
        lengths=options.lengths,
        turns=options.turns,
        python=options.torch_python,
        script=Path(__file__).with_name("torch_layers_sdpa.py"),
        heads=options.heads,
        threads=options.threads,
        repeats=options.repeats,
    )
    print(markdown(best), end="")
    return 0


def case(options: Options, length: int) -> dict[str, Any]:
    """Returns the attention layer's weights by path, an input x, and our output y."""
    shape = _shape(options, length)
    mixer = rat.mixers(shape)["attention"]
    layer = jax.jit(partial(rat.MixerLayer, mixer, options.width))(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (options.batch, length, options.width))
    ids = jnp.zeros(x.shape[:2], jnp.int32)

    @jax.jit
    def forward(layer, x):
        return layer(x, layer.mixer.init_cache(1, len(x), 0, x.dtype), Tokens(ids))[0]

    nested = to_nested_dict(layer)
    attention = nested["mixer"]["attention"]
    weights = {"scale": nested["norm"]["scale"]} | attention
    arrays = weights | {"x": x, "y": forward(layer, x)}
    return {name: np.asarray(array) for name, array in arrays.items()}


def ours(options: Options, length: int) -> Times:
    """Runs the bench's rows of our layers."""
    shape = _shape(options, length)
    rows = [
        row
        for name in LAYERS
        for row in rat.layer_rows(
            name, rat.mixers(shape)[name], shape, "float32", options.repeats
        )
    ]
    keys = [(length, *row.name.split("/")[1:]) for row in rows]
    return {
        (T, name, what): row.min_ms
        for (T, name, what), row in zip(keys, rows, strict=True)
    }


def markdown(times: Times) -> str:
    """Returns a table for each length: milliseconds, and times SDPA's in brackets."""
    lines = []
    for length in sorted({length for length, _, _ in times}):
        lines += [f"| T {length}, ms (times SDPA's) | {' | '.join(PASSES)} |"]
        lines += ["|---" * (len(PASSES) + 1) + "|"]
        theirs = [times[length, THEIRS, what] for what in PASSES]
        lines += ["| PyTorch SDPA | " + " | ".join(f"{ms:.2f}" for ms in theirs) + " |"]
        for name in LAYERS:
            columns = [
                f"{times[length, name, what]:.2f} "
                f"({times[length, name, what] / reference:.2f})"
                for what, reference in zip(PASSES, theirs, strict=True)
            ]
            lines.append(f"| {name} | {' | '.join(columns)} |")
        lines.append("")
    return "\n".join(lines)


def _shape(options: Options, length: int) -> dict[str, int]:
    return {"B": options.batch, "D": options.width, "H": options.heads, "T": length}


if __name__ == "__main__":
    host.prepare()  # as the command line, whose figures these are compared with
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"torch_layers.py: {error}")
