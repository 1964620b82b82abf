"""Our Transformer layer with ALiBi beside PyTorch's SDPA block, in one run.

The layer that `recurjax bench recurrent_transformer` compares with, and the same block
in plain PyTorch: the same weights and input, float32, on CPU, forward and forward and
backward. Both take turns, so that a ratio comes from one machine at one load; each
figure is the fastest of all turns.

    python experiments/recurrent_transformer/torch_block.py --torch-python PYTHON

PYTHON is an interpreter that has torch and numpy.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from recurjax.bench import recurrent_transformer as bench
from recurjax.bench.timing import repeat
from recurjax.bench.torch_peer import ask
from recurjax.cli.options import parse
from recurjax.errors import UserError
from recurjax.layers.position import Alibi, alibi_slopes
from recurjax.machine import host
from recurjax.parameters import to_nested_dict

PASSES = ("forward", "forward_backward")
LARGEST = bench.SMALL[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Times both sides in turns.

    Attributes:
      torch_python: an interpreter that has torch and numpy.
      batch: B.
      length: T.
      width: D.
      heads: H.
      turns: how often each side runs.
      repeats: timed calls of each program in a turn.
      threads: of torch.
    """

    torch_python: str
    batch: int = LARGEST["B"]
    length: int = LARGEST["T"]
    width: int = LARGEST["D"]
    heads: int = LARGEST["H"]
    turns: int = 3
    repeats: int = 5
    threads: int = 2

    def __post_init__(self):
        sizes = (self.batch, self.length, self.turns, self.repeats, self.threads)
        if min(*sizes, self.heads) < 1:
            raise UserError("all sizes must be at least 1")
        if self.width % self.heads:
            raise UserError("--width must be a multiple of --heads")

    @property
    def shape(self) -> dict[str, int]:
        """The sizes by their letters, as the bench takes them."""
        return {"B": self.batch, "T": self.length, "D": self.width, "H": self.heads}


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints a table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="torch_block.py")
    layer = bench.layers(options.shape)["transformer"]
    made = bench.programs(layer, options.shape, "float32")
    best: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "block.npz"
        np.savez(arrays, allow_pickle=False, **_arrays(made, options))
        for _ in range(options.turns):
            answer = ask(
                options.torch_python,
                Path(__file__).with_name("torch_block_sdpa.py"),
                arrays,
                heads=options.heads,
                threads=options.threads,
                repeats=options.repeats,
            )
            print(f"z apart by {answer['difference']:.1e}", flush=True)
            for what in PASSES:
                program = getattr(made, what)
                times = repeat(
                    lambda program=program: program(made.stack, made.x),
                    repeats=options.repeats,
                )
                for side, ms in (("torch", answer[what]), ("ours", 1e3 * min(times))):
                    best[side, what] = min(ms, best.get((side, what), ms))
    print("| ms | " + " | ".join(PASSES) + " |\n|---|---|---|")
    for side, name in {"torch": "PyTorch, SDPA", "ours": "ours"}.items():
        told = [
            f"{best[side, what]:.1f} ({best[side, what] / best['torch', what]:.2f})"
            for what in PASSES
        ]
        print(f"| {name} | " + " | ".join(told) + " |")
    return 0


def _arrays(made: bench.Programs, options: Options) -> dict[str, np.ndarray]:
    """Returns the layer's weights by path, the input x and our output z."""
    block = jax.tree.map(lambda leaf: leaf[0], to_nested_dict(made.stack))["blocks"]
    flat = jax.tree_util.tree_flatten_with_path(block)[0]
    arrays = {".".join(str(key.key) for key in path[1:]): leaf for path, leaf in flat}
    arrays |= {"x": made.x, "z": made.forward(made.stack, made.x)}
    arrays["slopes"] = alibi_slopes(options.heads, Alibi()).astype(np.float32)
    return {name: np.asarray(array) for name, array in arrays.items()}


if __name__ == "__main__":
    host.prepare()  # as the command line, whose figures these are compared with
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"torch_block.py: {error}")
