"""Our layers beside PyTorch's, in one run: a Transformer's, and the authors' own.

The two layers of `recurjax bench recurrent_transformer`, float32, on CPU, forward and
forward and backward. Beside the Transformer layer with ALiBi the same block in plain
PyTorch; with --authors DIR, a checkout of the paper's code, also its tiled layer beside
our Recurrent Transformer's, eager and as torch.compile makes it. Each pair has the same
weights and input and takes turns, so that a ratio comes from one machine at one load;
each figure is the fastest of all turns.

    python experiments/recurrent_transformer/torch_block.py --torch-python PYTHON
    git clone https://github.com/geniucos/recurrent-transformer authors
    PYTHON -m pip install omegaconf boto3 cached_path datasets importlib_resources
    python experiments/recurrent_transformer/torch_block.py --torch-python PYTHON \
        --authors authors --length 256 --width 128

PYTHON is an interpreter that has torch and numpy.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
OURS = {"transformer": "our Transformer", "prefix": "our layer"}
"""How the table names our layers, by their names in the bench."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Times both sides in turns.

    Attributes:
      torch_python: an interpreter that has torch and numpy.
      authors: a checkout of the paper's code, whose layer is timed too.
      batch: B.
      length: T.
      width: D.
      heads: H.
      turns: how often each side runs.
      repeats: timed calls of each program in a turn.
      threads: of torch.
    """

    torch_python: str
    authors: Path | None = None
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
        if self.authors is not None and not (self.authors / "olmo").is_dir():
            raise UserError(
                f"--authors {self.authors} is no checkout of the paper's code: it has "
                "no folder olmo"
            )

    @property
    def shape(self) -> dict[str, int]:
        """The sizes by their letters, as the bench takes them."""
        return {"B": self.batch, "T": self.length, "D": self.width, "H": self.heads}


class Side(NamedTuple):
    """One of PyTorch's.

    Attributes:
      name: in the table.
      script: beside this file.
      environment: of its process.
    """

    name: str
    script: str
    environment: dict[str, str]


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints a table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="torch_block.py")
    pairs = {"transformer": [Side("PyTorch, SDPA", "torch_block_sdpa.py", {})]}
    if options.authors is not None:
        path = {"PYTHONPATH": str(options.authors.absolute())}
        eager = path | {"TORCHDYNAMO_DISABLE": "1"}
        pairs["prefix"] = [
            Side("the authors' tiled layer, eager", "torch_block_authors.py", eager),
            Side("the same, compiled", "torch_block_authors.py", path),
        ]
    print("| ms (over ours) | " + " | ".join(PASSES) + " |\n|---|---|---|")
    for layer, sides in pairs.items():
        best = _times(layer, sides, options)
        ours = OURS[layer]
        for name in (*(side.name for side in sides), ours):
            columns = [
                f"{best[name, what]:.1f} ({best[name, what] / best[ours, what]:.2f})"
                for what in PASSES
            ]
            print(f"| {name} | " + " | ".join(columns) + " |", flush=True)
    return 0


def _times(
    layer: str, sides: list[Side], options: Options
) -> dict[tuple[str, str], float]:
    """Returns the fastest time of each side and pass, and of ours, in milliseconds."""
    passes = bench.programs(
        bench.layers(options.shape)[layer], options.shape, "float32"
    )
    ours = OURS[layer]
    best: dict[tuple[str, str], float] = {}

    def took(name: str, what: str, ms: float) -> None:
        best[name, what] = min(ms, best.get((name, what), ms))

    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "block.npz"
        np.savez(arrays, allow_pickle=False, **_arrays(passes, options))
        for _ in range(options.turns):
            for side in sides:
                answer = ask(
                    options.torch_python,
                    Path(__file__).with_name(side.script),
                    arrays,
                    heads=options.heads,
                    threads=options.threads,
                    repeats=options.repeats,
                    environment=side.environment,
                )
                apart = answer["difference"]
                print(f"{side.name}: z apart by {apart:.1e}", file=sys.stderr)
                for what in PASSES:
                    took(side.name, what, answer[what])
            for what in PASSES:
                program = getattr(passes, what)
                times = repeat(
                    lambda program=program: program(passes.stack, passes.x),
                    repeats=options.repeats,
                )
                took(ours, what, 1e3 * min(times))
    return best


def _arrays(passes: bench.LayerPasses, options: Options) -> dict[str, np.ndarray]:
    """Returns the layer's weights by path, the input x and our output z."""
    block = jax.tree.map(lambda leaf: leaf[0], to_nested_dict(passes.stack))["blocks"]
    if len(block) == 1:  # The Transformer's are in runs of equal layers.
        (block,) = block.values()
    flat = jax.tree_util.tree_flatten_with_path(block)[0]
    arrays = {".".join(str(key.key) for key in path): leaf for path, leaf in flat}
    arrays |= {"x": passes.x, "z": passes.forward(passes.stack, passes.x)}
    arrays["slopes"] = alibi_slopes(options.heads, Alibi()).astype(np.float32)
    return {name: np.asarray(array) for name, array in arrays.items()}


if __name__ == "__main__":
    host.prepare()  # as the command line, whose figures these are compared with
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"torch_block.py: {error}")
