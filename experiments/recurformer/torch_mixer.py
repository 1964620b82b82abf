"""transformers' MambaMixer beside `recurjax bench recurformer`'s mixer, in one run.

The same weights and input on both sides, float32, on CPU: forward, and up to 256
positions forward and backward, which takes transformers time by their square. Processes
take turns, so that a ratio comes from one machine at one load; each figure is the
fastest of all turns. transformers runs its loop over positions in PyTorch, which is
what it has without mamba-ssm's CUDA kernels. Expect ours to be at least three times as
fast.

    python experiments/recurformer/torch_mixer.py --torch-python PYTHON

PYTHON is an interpreter that has torch, numpy and transformers.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from recurjax.bench import recurformer
from recurjax.bench.torch_peer import Times, best_of_turns
from recurjax.cli.options import parse
from recurjax.errors import UserError
from recurjax.machine import host
from recurjax.parameters import to_nested_dict
from recurjax.variants.recurformer import MambaConfig
from recurjax.variants.recurformer.mamba import Mamba

PASSES = ("forward", "forward_backward")
SIDES = ("transformers", "recurjax")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Times both sides in turns.

    Attributes:
      torch_python: an interpreter that has torch, numpy and transformers.
      lengths: T.
      batch: B.
      width: of the mixer, d_m.
      turns: how often each side runs.
      repeats: timed calls of each program in a turn.
      threads: of torch.
    """

    torch_python: str
    lengths: tuple[int, ...] = (256, 2048)
    batch: int = 1
    width: int = recurformer.SMALL_LAYER["D"]
    turns: int = 3
    repeats: int = 3
    threads: int = 1

    def __post_init__(self):
        sizes = (self.batch, self.width, self.turns, self.repeats, self.threads)
        if not self.lengths or min(*sizes, *self.lengths) < 1:
            raise UserError("all sizes must be at least 1, with at least one of them")


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints a table for each length."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="torch_mixer.py")
    best = best_of_turns(
        SIDES[0],
        partial(case, options),
        partial(ours, options),
        lengths=options.lengths,
        turns=options.turns,
        python=options.torch_python,
        script=Path(__file__).with_name("torch_mixer_transformers.py"),
        heads=1,
        threads=options.threads,
        repeats=options.repeats,
    )
    print(markdown(best), end="")
    return 0


def case(options: Options, length: int) -> dict[str, Any]:
    """Returns the mixer's weights by name, an input x, and our output y."""
    config = MambaConfig(dt_rank=recurformer.DT_RANK)
    mamba = Mamba(config, options.width, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (options.batch, length, options.width))
    y = jax.jit(lambda mamba, x: mamba(x, mamba.init_cache(len(x)))[0])(mamba, x)
    arrays = to_nested_dict(mamba) | {"x": x, "y": y}
    return {name: np.asarray(array) for name, array in arrays.items()}


def ours(options: Options, length: int) -> Times:
    """Runs the bench's rows of our mixer."""
    sizes = {"B": options.batch, "D": options.width, "T": length}
    rows = recurformer.mixer_rows(sizes, "float32", options.repeats)
    return {(length, SIDES[1], row.name.split("/")[1]): row.min_ms for row in rows}


def markdown(times: Times) -> str:
    """Returns a table for each length: milliseconds, and ours to theirs."""
    lines = []
    for length in sorted({length for length, _, _ in times}):
        lines += [f"| T {length}, ms | {' | '.join(PASSES)} |"]
        lines += ["|---" * (len(PASSES) + 1) + "|"]
        both = [[times.get((length, side, what)) for what in PASSES] for side in SIDES]
        for side, cells in zip(SIDES, both, strict=True):
            lines.append(f"| {side} | {' | '.join(map(_cell, cells))} |")
        theirs, ours = both
        ratios = [
            None if them is None or us is None else them / us
            for them, us in zip(theirs, ours, strict=True)
        ]
        lines += [f"| times as fast | {' | '.join(map(_cell, ratios))} |", ""]
    return "\n".join(lines)


def _cell(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.1f}"


if __name__ == "__main__":
    host.prepare()  # as the command line, whose figures these are compared with
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"torch_mixer.py: {error}")
