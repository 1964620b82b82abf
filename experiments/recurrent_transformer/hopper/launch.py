"""The division of the persistent kernel: its programs' stages, order and memory.

The kernel is a pipeline. A program has one block of one of the layer's weights, and so
one stage of a position's work for all rows; 64 rows at a time go from stage to stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.call import Array, LayerSpec

SIDE = 64
"""Rows that are computed at once, and channels of a head."""
CHUNK = 32
"""Columns of rows that come on chip in one copy."""
RING = 6
"""Such chunks that are on their way to a worker or being multiplied."""
WORKERS = 2
"""Warpgroups of a program: while one finishes a block of rows, the other multiplies."""
_ALIGNED = 8
_BARRIER_BYTES = 8

ATTENDED, OUT, UP, DOWN, PAIR, PARTS = KINDS = range(6)
"""What a block of rows is told of at a position: what its stages have written, in their
order, and the parts of the product with w_down."""


class LayerWidths(NamedTuple):
    """D, H E and F of a layer."""

    model: int
    heads: int
    inner: int


class Stage(NamedTuple):
    """A weight's columns, shared out among programs.

    The last group's columns end with the weight: where they do not divide, some are the
    last but one's too, computed twice and the same.

    Attributes:
      first: its first program.
      width: columns of the weight.
      groups: sets of programs that have the same columns.
      parts: programs of a group, each its part of the contracted axis. They take
        turns in adding up, block after block of rows.
    """

    first: int
    width: int
    groups: int
    parts: int

    @property
    def programs(self) -> int:
        return self.groups * self.parts


class WidthCut(NamedTuple):
    """A layer's stages: a program has `columns` columns and `depth` rows of a weight.

    Keys and values are stages of their own, so that a group's columns are one's alone.
    """

    columns: int
    depth: int
    out: Stage
    up: Stage
    down: Stage
    key: Stage
    value: Stage

    @classmethod
    def of(cls, widths: LayerWidths, columns: int) -> "WidthCut":
        """Cuts weights of D contracted rows, which w_down has F / D times."""
        D, HE, F = widths
        stages, first = [], 0
        for width, parts in ((D, 1), (F, 1), (D, F // D), (HE, 1), (HE, 1)):
            stages.append(Stage(first, width, -(-width // columns), parts))
            first += stages[-1].programs
        return cls(columns, D, *stages)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.out, self.up, self.down, self.key, self.value)

    @property
    def programs(self) -> int:
        return sum(stage.programs for stage in self.stages)

    def starts(self, stage: Stage) -> list[int]:
        """Returns each group's first column."""
        last = stage.width - self.columns
        return [min(n * self.columns, last) for n in range(stage.groups)]

    @property
    def shared_bytes(self) -> int:
        """Returns the shared memory of a program with 16-bit weights."""
        weight = 2 * self.columns * self.depth
        chunks = WORKERS * RING
        barriers = _BARRIER_BYTES * (1 + chunks)
        return weight + chunks * 2 * SIDE * CHUNK + barriers


class RowTask(NamedTuple):
    """A block of rows at a position; `there`: whether there is such a one."""

    position: Any
    block: Any
    there: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The settings that all kernels of a call share.

    A worker goes through ticks and does at each what the tick has for it: attention of
    a block of rows, then its stage of an earlier one. What it waits for belongs to
    smaller ticks, or to a part of w_down in the same one, which waits for smaller ones
    only: no two workers can wait for one another. How far one is ahead of another, the
    waiting alone decides.

    Attributes:
      blocks: number of blocks of 64 rows.
      loaded: number of the 64 rows that are read.
      played: programs that one instance of the grid plays one after the other: one on
        a device; all of them in the interpreter, which runs a grid's instances one
        after the other and has no semaphores.
      workers: number of workers of an instance.
      interpret: False, or the interpreter's parameters.
    """

    spec: LayerSpec
    cut: WidthCut
    blocks: int
    loaded: int = SIDE
    played: int = 1
    workers: int = WORKERS
    interpret: Any = False

    @property
    def instances(self) -> int:
        """The size of the grid."""
        return self.cut.programs // self.played

    @property
    def period(self) -> int:
        """Ticks between a block's positions: its pair is made before it attends."""
        return max(self.blocks, PAIR + 1)

    def ticks(self, count: int) -> int:
        """Returns how many there are for `count` positions."""
        return (count - 1) * self.period + self.blocks + PAIR

    def task(self, tick: Any, kind: Any, count: int) -> RowTask:
        """Returns what a stage has at a tick, by what it writes, ATTENDED to PAIR."""
        n = tick - kind
        position, block = n // self.period, n % self.period
        there = (n >= 0) & (block < self.blocks) & (position < count)
        return RowTask(position, block, there)

    def first_head(self, block: Any, worker: Any) -> Any:
        """Returns the first of a block's heads that a worker attends for.

        The others follow at distances of `all_workers`; from H on there are none. Heads
        of a block belong to the same workers at every position.
        """
        return (worker - block * self.spec.heads) % self.all_workers

    @property
    def all_workers(self) -> int:
        return self.cut.programs * self.workers

    def adds_up(self, part: Any, block: Any) -> Any:
        """Returns whether a part of w_down adds up the others of its group."""
        return part == block % self.cut.down.parts

    def arrivals(self, kind: Any) -> Any:
        """Returns how often a block is signalled at a position."""
        out, up, down, key, value = (stage.programs for stage in self.cut.stages)
        sums = self.cut.down.groups
        heads = self.spec.heads
        return choose(kind, (heads, out, up, sums, key + value, down - sums))

    def before_attention(self, position: Any) -> "Arrivals":
        """Returns what a block's heads wait for."""
        return Arrivals(PAIR, position * self.arrivals(PAIR))

    def before_product(self, kind: Any, position: Any) -> "Arrivals":
        """Returns what a stage that writes `kind` waits for."""
        return Arrivals(kind - 1, (position + 1) * self.arrivals(kind - 1))

    def before_sum(self, position: Any) -> "Arrivals":
        """Returns what a part that adds up waits for besides."""
        return Arrivals(PARTS, (position + 1) * self.arrivals(PARTS))


class Arrivals(NamedTuple):
    """The value that a block's counter of a kind must reach."""

    kind: Any
    times: Any


def choose(n: Any, of: Sequence[int]) -> Any:
    """Returns of[n], of numbers that are known for an n that need not be."""
    return sum((n == i) * value for i, value in enumerate(of))


def choose_cut(widths: LayerWidths, *, most: int, shared: int) -> WidthCut | None:
    """Returns the cut into the most programs, up to `most`, that fit `shared` bytes."""
    D, HE, F = widths
    if D != HE or F % D or D % SIDE:
        return None
    for columns in range(CHUNK, D + 1, _ALIGNED):
        cut = WidthCut.of(widths, columns)
        if cut.programs <= most:
            return cut if cut.shared_bytes <= shared else None
    return None


def refusal_of_widths(widths: LayerWidths, *, most: int, shared: int) -> str | None:
    """Returns why a layer cannot be held by `most` programs at once, None if it can."""
    if choose_cut(widths, most=most, shared=shared) is not None:
        return None
    D, HE, F = widths
    return (
        f"finds no cut of D={D}, heads * head_width={HE}, F={F} into at most {most} "
        f"programs whose weights fit {shared} bytes each; it cuts layers with "
        "heads * head_width = D and F a multiple of D"
    )


def slopes_of(spec: LayerSpec) -> Float[Array, " H"]:
    """Returns ALiBi's slopes, zeros without ALiBi."""
    m = spec.alibi_max_bias
    if m is None:
        return jnp.zeros(spec.heads)
    return jnp.exp2(-m / spec.heads * jnp.arange(1.0, spec.heads + 1))
