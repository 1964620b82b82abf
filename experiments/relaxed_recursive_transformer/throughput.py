"""Figure 8: tokens per second of depth-wise batching, as the paper simulates it.

A queue of samples is decoded by a fixed number of slots. A slot runs one pass at a time
and takes the next sample when its own is done; the passes of all slots run together and
take as long as a pass of that many rows. Three ways:

    static       full passes; a batch ends with its longest sample
    sequence     full passes; a finished sample is replaced at once
    depth        passes of one block; a token that leaves is followed by its successor

Exits are the oracle's: the first loop whose likeliest token is the full model's, read
off a text by the full model (`recurjax evaluate exits RUN --trajectories exits.npz`).
The head, and keys and values of skipped loops, take no time, as in the paper: an upper
bound. Times of a pass by rows are measured or planned (`recurjax plan RUN --program
decode --rows N`), `--full` for all layers and `--block` for one loop; between two sizes
they are on a line.

    python experiments/relaxed_recursive_transformer/throughput.py exits.npz \
        --full 64:39.4 --block 74:19.6

prints Gemma's figures on SlimPajama where exits.npz has 1.195 loops a token: 0.616 ms a
token, 1,622 tokens per second, by full passes, and 0.265 ms per loop, 3,159, by depth.
"""

import heapq
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Int

from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.model import Cache, Decoder, ModelConfig, count_parameters
from recurjax.run_table import load_experiment


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Simulates the three ways and prints tokens per second.

    Attributes:
      trajectories: the file of `evaluate exits --trajectories`.
      full: ROWS:MS of a pass through all layers, one or more; slots are the most rows.
      block: ROWS:MS of a pass through the block; slots are the most rows.
      samples: samples in the queue, drawn from the file's rows.
      tokens: tokens of a sample, at most; None: the full row.
      mean_tokens: lengths are drawn, exponentially, with this mean; None: full rows.
      seed: seed of the draws.
      model: a row of runs.py or an experiment; prints how many rows of it fit.
      memory_gib: GiB of the device's memory, for `model`; the paper's has 40.
      length: tokens of a row, for `model`; the paper's are 512 + 2,048 and 64 + 256.
    """

    trajectories: Annotated[Path, tyro.conf.Positional]
    full: tuple[str, ...]
    block: tuple[str, ...]
    samples: int = 20_000
    tokens: int | None = None
    mean_tokens: float | None = None
    seed: int = 0
    model: str | None = None
    memory_gib: float = 40.0
    length: int = 2560

    @property
    def memory(self) -> float:
        """Bytes of the device."""
        return self.memory_gib * 2**30

    def __post_init__(self):
        if self.samples < 1 or not self.full or not self.block:
            raise UserError(
                "--samples must be at least 1, and --full and --block are required"
            )


class PassTimes(NamedTuple):
    """Milliseconds of a pass by its rows, ascending; linear between and from zero."""

    rows: tuple[float, ...]
    milliseconds: tuple[float, ...]

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the time of passes of `rows` rows."""
        return np.interp(rows, (0.0, *self.rows), (0.0, *self.milliseconds))


def pass_times(words: tuple[str, ...], *, option: str) -> PassTimes:
    """Reads ROWS:MS words.

    Raises:
      UserError: a word is something else.
    """
    try:
        pairs = sorted(tuple(map(float, word.split(":"))) for word in words)
        rows, milliseconds = zip(*pairs, strict=True)
    except ValueError as error:
        raise UserError(
            f"--{option} {' '.join(words)}: write ROWS:MS, such as 64:39.4"
        ) from error
    return PassTimes(rows, milliseconds)


class Queue(NamedTuple):
    """Samples by what they take: tokens, and loops of all their tokens."""

    tokens: Int[np.ndarray, " N"]
    loops: Int[np.ndarray, " N"]


def draw_queue(
    exits: Int[np.ndarray, "R T"],
    *,
    samples: int,
    tokens: int | None = None,
    mean_tokens: float | None = None,
    seed: int = 0,
) -> Queue:
    """Draws samples from rows of exits, 0 where a row has no token."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(len(exits), size=samples)
    counts = (exits > 0).sum(1)
    # Tokens of a row come first, in their order: what is 0 goes after them.
    order = np.argsort(exits == 0, axis=1, kind="stable")
    exits = np.take_along_axis(exits, order, axis=1)
    lengths = counts[rows]
    if mean_tokens is not None:
        lengths = np.minimum(lengths, 1 + draw.exponential(mean_tokens, samples) // 1)
    if tokens is not None:
        lengths = np.minimum(lengths, tokens)
    lengths = lengths.astype(int)
    sums = np.concatenate([np.zeros((len(exits), 1), int), exits.cumsum(1)], axis=1)
    return Queue(lengths, sums[rows, lengths])


def refilled(passes: np.ndarray, slots: int) -> np.ndarray:
    """Returns how many slots run at each pass, when free ones take the next sample."""
    free = [0] * min(slots, len(passes))
    ends = np.empty(len(passes), int)
    starts = np.empty(len(passes), int)
    for number, count in enumerate(passes.tolist()):
        starts[number] = heapq.heappop(free)
        ends[number] = starts[number] + count
        heapq.heappush(free, ends[number])
    change = np.zeros(ends.max() + 1, int)
    np.add.at(change, starts, 1)
    np.add.at(change, ends, -1)
    return change.cumsum()[:-1]


def in_batches(passes: np.ndarray, slots: int) -> np.ndarray:
    """Returns the same where a batch ends with its longest sample; padding runs too."""
    cuts = range(0, len(passes), slots)
    batches = [passes[cut : cut + slots] for cut in cuts]
    return np.concatenate([np.full(batch.max(), len(batch)) for batch in batches])


def throughput(queue: Queue, full: PassTimes, block: PassTimes) -> dict[str, float]:
    """Returns tokens per second of the three ways."""

    def speed(running: np.ndarray, times: PassTimes) -> float:
        return float(queue.tokens.sum() / times.of(running).sum() * 1e3)

    slots, deep_slots = int(full.rows[-1]), int(block.rows[-1])
    return {
        "static": speed(in_batches(queue.tokens, slots), full),
        "sequence": speed(refilled(queue.tokens, slots), full),
        "depth": speed(refilled(queue.loops, deep_slots), block),
    }


def largest_batch(config: ModelConfig, *, length: int, memory: float) -> int:
    """Returns how many rows of a length fit next to the parameters, both in bfloat16.

    Args:
      memory: bytes of the device; activations are left out, as the paper's are.
    """

    def row_cache(key: jax.Array) -> Cache:
        return Decoder(config, rngs=nnx.Rngs(key)).init_cache(1, length, "bfloat16")

    row = jax.eval_shape(row_cache, jax.random.key(0))
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(row))
    return int((memory - 2 * count_parameters(config).total) // each)


def main(argv: list[str] | None = None) -> int:
    """Prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="throughput.py")
    full = pass_times(options.full, option="full")
    block = pass_times(options.block, option="block")
    with np.load(options.trajectories, allow_pickle=False) as file:
        exits = file["exits"].astype(int)
    queue = draw_queue(
        exits,
        samples=options.samples,
        tokens=options.tokens,
        mean_tokens=options.mean_tokens,
        seed=options.seed,
    )
    if options.model is not None:
        config, memory = (
            load_experiment(options.model).model,
            options.memory_gib * 2**30,
        )
        rows = largest_batch(config, length=options.length, memory=memory)
        print(f"{options.model}: {rows:,} rows of {options.length:,} tokens fit")
    result = throughput(queue, full, block)
    mean = queue.loops.sum() / queue.tokens.sum()
    print(f"{len(queue.tokens):,} samples, {mean:.3f} loops a token\n")
    print("| batching | tokens/s | over static | over sequence-wise |")
    print("|---|---|---|---|")
    for name, speed in result.items():
        ratios = (speed / result[other] for other in ("static", "sequence"))
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {name} | {speed:,.0f} | {cells} |")
    return 0


if __name__ == "__main__":
    run_script(main)
