"""A Triton program's indices, and how it loads and stores there."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.gated_scan.triton_launch import GateInputs, Launch

Array = jax.Array
Tiled = list[Array]
"""One array [tiles, channels] for each group of tiles that a program owns; for a narrow
stream one [1, channels]. Triton's compiler visits all operations for each load and
store: tile by tile that takes it tens of seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanProgram:
    """The program's row, stretch and channels.

    Attributes:
      row: row of the batch.
      block: number of its stretch.
      column: its first channel within a tile.
    """

    launch: Launch
    row: Array
    block: Array
    column: Array

    @classmethod
    def here(cls, launch: Launch) -> "ScanProgram":
        """Returns this program's indices: neighbours have neighbouring channels."""
        # Neighbours in memory run side by side, so that they share its lines.
        n = pl.program_id(0)
        place = n // launch.columns
        return cls(
            launch=launch,
            row=place // launch.blocks,
            block=place % launch.blocks,
            column=(n % launch.columns) * launch.tiles.channels,
        )

    @property
    def first(self) -> Array:
        """Returns the first position of the stretch."""
        return self.block * self.launch.tiles.positions

    @property
    def turns(self) -> int:
        """Returns how often `unroll` positions make up the stretch."""
        tiles = self.launch.tiles
        return -(-tiles.positions // tiles.unroll)

    # None where every program's positions are its own: then no access needs a mask.
    def inside(self, t: Array) -> Array | None:
        """Returns whether position t is the program's own; None: always."""
        if not self.launch.ragged:
            return None
        end = jnp.minimum(self.first + self.launch.tiles.positions, self.launch.T)
        return t < end

    def read(self, ref, t: Array, *, other: float, keep: Array | None) -> Tiled:
        """Reads position t of an array [B T, tiles, ...] in float32, or `other`."""
        return self._load(ref, self.row * self.launch.T + t, other, keep)

    def write(self, ref, t: Array, parts: Tiled, keep: Array | None) -> None:
        """Writes position t of an array [B T, tiles, ...] where `keep`."""
        self._store(ref, self.row * self.launch.T + t, parts, keep)

    def read_row(self, ref, keep: Array | None = None) -> Tiled:
        """Reads the row's state of an array [B, tiles, W]; zeros unless `keep`."""
        return self._load(ref, self.row, 0.0, keep)

    def write_row(self, ref, parts: Tiled, keep: Array | None = None) -> None:
        """Writes the row's state of an array [B, tiles, W] where `keep`."""
        self._store(ref, self.row, parts, keep)

    def read_block(self, ref, block: Array) -> Tiled:
        """Reads a stretch's summary of an array [B blocks, tiles, W]."""
        return self._load(ref, self.row * self.launch.blocks + block, 0.0, None)

    def write_block(self, ref, parts: Tiled) -> None:
        """Writes the stretch's summary of an array [B blocks, tiles, W]."""
        self._store(ref, self.row * self.launch.blocks + self.block, parts, None)

    def read_bias(self, refs: tuple) -> Tiled | None:
        """Reads the program's channels of the bias of logits; None: none are given."""
        return self._load(refs[0], jnp.int32(0), 0.0, None) if refs else None

    def resets_at(self, refs: tuple, t: Array, keep: Array | None) -> Array | None:
        """Returns whether the state is reset before position t; None: nowhere."""
        if not refs:
            return None
        line = t if self.launch.resets == 1 else self.row * self.launch.T + t
        if keep is None:
            return refs[0][line] != 0
        # Beyond the stretch some number is read that is there, and nothing is reset.
        return (refs[0][jnp.where(keep, line, 0)] != 0) & keep

    def _load(self, ref, line: Array, other: float, keep: Array | None) -> Tiled:
        places, shape = self._places(ref, line)
        mask = _masked(shape, keep)
        mask |= {"other": other} if mask else {}
        return [pltriton.load(at, **mask).astype(jnp.float32) for at in places]

    def _store(self, ref, line: Array, parts: Tiled, keep: Array | None) -> None:
        places, shape = self._places(ref, line)
        for at, part in zip(places, parts, strict=True):
            pltriton.store(at, part.astype(ref.dtype), **_masked(shape, keep))

    def _places(self, ref, line: Array) -> tuple[list, tuple[int, int]]:
        """Returns where the program's numbers of a line stand, and one array's shape.

        An array as wide as the gate has all tiles, a narrow one has one. Its last axis
        has a tile's channels, or fewer numbers: each is then one of several channels.
        """
        tiles, numbers = ref.shape[1:]
        each = self.launch.width // numbers
        shape = (
            min(self.launch.together, tiles),
            max(1, self.launch.tiles.channels // each),
        )
        columns = pl.ds(self.column // each, shape[1])
        firsts = range(0, tiles, shape[0])
        return [ref.at[line, pl.ds(tile, shape[0]), columns] for tile in firsts], shape


def _masked(shape: tuple[int, int], keep: Array | None) -> dict:
    return {} if keep is None else {"mask": jnp.full(shape, keep)}


class Gates(NamedTuple):
    """The gate's references in a program, and the computation of g.

    Attributes:
      refs: references.
      bias: bias of its channels, read once; None: the gate itself is given.
    """

    program: ScanProgram
    refs: GateInputs
    bias: Tiled | None

    @classmethod
    def of(cls, program: ScanProgram, refs: GateInputs) -> "Gates":
        """Reads what is the same at all positions."""
        return cls(program, refs, program.read_bias(refs.bias))

    def read(self, t: Array, keep: Array | None) -> "Read":
        """Reads position t; beyond the stretch it keeps the state as it is."""
        # A gate of 1, which is a logit of infinity, takes nothing of the value.
        other = 1.0 if self.bias is None else float("inf")
        parts = self.program.read(self.refs.gate, t, other=other, keep=keep)
        return Read(parts, self.program.resets_at(self.refs.resets, t, keep))

    def at(self, read: "Read") -> list[tuple[Array, Array]]:
        """Returns (g, the factor of the state before) of every tile."""
        parts = read.parts
        if self.bias is not None:
            parts = [
                jax.nn.sigmoid(part + bias)
                for part, bias in zip(parts, self.bias, strict=True)
            ]
        if read.resets is None:
            return [(g, g) for g in parts]
        return [(g, jnp.where(read.resets, 0.0, g)) for g in parts]


class Read(NamedTuple):
    """The gate or logits of one position by tile, and whether its state is reset."""

    parts: Tiled
    resets: Array | None


def over_tiles(each: Tiled, like: Tiled) -> Tiled:
    """Sums what all tiles give of a stream over those that share its channels."""
    if len(like) == len(each) and like[0].shape == each[0].shape:
        return each  # As wide as the gate: no tile shares its channels.
    total = sum(each[1:], start=each[0])
    return [jnp.sum(total, axis=0, keepdims=True)]


def at_group(parts: Tiled, group: int) -> Array:
    """Returns what a group of tiles reads of a stream: of a narrow one all the same."""
    return parts[group % len(parts)]
