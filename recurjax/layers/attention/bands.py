"""Causal attention in bands of queries, with any mask or bias by position: plain XLA.

A band's queries see keys up to its own end only, which is known while tracing, so most
of the hidden half is never computed; a block of them at a time bounds the memory that
logits take. What hides a key (causality, a window, another document) and what is added
for its distance (ALiBi) are made from positions inside the block: no array of T x T
elements is ever held. The query heads that share a key head are rows of one product,
so that keys and values are never repeated.

Without a window, bands see stretches of keys from the first to the band's own end. With
one, all blocks are alike: each sees its own keys and as many before it as the window
reaches back.

Logits are [keys, rows]: maxima and sums over keys then run along the vectors of a
CPU, which has no fast sum along them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from pallas_kernels import dispatch, reductions, target
from pallas_kernels.cpu import attention as cpu_attention
from pallas_kernels.mesh_cut import Cut as MeshCut
from recurjax.layers.attention.implementation import find_cut
from recurjax.types import Array

_BANDS = 8
"""The most bands: each is a part of the program. With n of them (n + 1) / 2n of all
logits are computed, where half of them count."""
_LEAST_ROWS, _ROW_MULTIPLE = 64, 16
_IN_CACHE = 2**18
"""Logits of a block on a CPU, 1 MB in float32: they are read three times."""
_IN_MEMORY = 2**24
"""Logits of a block on a device that runs all units at once."""


def attend_in_bands(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    *,
    scale: float,
    window: int | None = None,
    segments: Int[Array, "B T"] | None = None,
    slopes: np.ndarray | Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
    implementation: Literal["cpu", "xla"] = "xla",
) -> Float[Array, "B T H E"]:
    """Computes causal attention as `attend` does, in memory of B H T.

    Kept for the gradient: inputs, o and the log-sum-exp of the logits.

    Args:
      slopes: ALiBi's slopes, which are constants and get no gradient.
      implementation: "cpu" is C++ in tiles, "xla" the bands.
    """
    by_head = None
    if slopes is not None:
        by_head = jnp.asarray(slopes, jnp.promote_types(q.dtype, jnp.float32))
    options = BandedOptions(scale=scale, window=window, soft_cap=soft_cap)
    call = BandedCall(q, k, v, segments, by_head, options)
    return dispatch.run(_OP, call, implementation=implementation)


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True, slots=True)
class BandedOptions:
    """The static options of a call."""

    scale: float
    window: int | None
    soft_cap: float | None


class BandedCall(NamedTuple):
    """The arguments of the backend, see `attend_in_bands`."""

    q: Float[Array, "B T H E"]
    k: Float[Array, "B T K E"]
    v: Float[Array, "B T K E"]
    segments: Int[Array, "B T"] | None
    slopes: Float[Array, " H"] | None
    options: BandedOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Blocks of queries.

    Attributes:
      first: position of the first query.
      blocks: how many blocks it has.
      keys: how many keys each block sees.
      slides: whether they move with the block; else they begin at position 0.
    """

    first: int
    blocks: int
    keys: int
    slides: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BandCut:
    """A call's cut.

    Attributes:
      units: how many units run at once; a divisor of all.
      rows: queries of a head in a block.
      bands: bands of all queries; the last one is padded.
      padded: T and the padding after it.
      before, after: keys of padding in front of the first and after the last.
    """

    units: int
    rows: int
    bands: tuple[Band, ...]
    padded: int
    before: int
    after: int


class _BandRows(NamedTuple):
    """A block of queries of some units; r counts the heads of a unit, then queries.

    Attributes:
      start: position of the first query.
      t: position of each row.
      arrays: what the caller cut into blocks, [units, r, ...].
      segments: segments of each row, or None.
      slopes: slopes of each row, or None.
    """

    start: Array | int
    t: Int[Array, " r"]
    arrays: dict[str, Array]
    segments: Int[Array, "u r"] | None
    slopes: Float[Array, "u r"] | None


class _Keys(NamedTuple):
    """The keys that a block of queries may see, of some units."""

    s: Int[Array, " S"]
    k: Float[Array, "u S E"]
    v: Float[Array, "u S E"]
    segments: Int[Array, "u S"] | None


class _Backend:
    """Runs the op through the shared dispatch: gradients, and a mesh."""

    @staticmethod
    def supported(call: BandedCall) -> str | None:
        """Returns None: everything is."""
        del call
        return None

    @staticmethod
    def forward(
        call: BandedCall, *, residuals: bool
    ) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
        """Returns o and the log-sum-exp."""
        del residuals  # The compiler removes unused results.
        (q, _, v), units = call[:3], _Units(call)

        def block(rows: _BandRows, keys: _Keys):
            logits, hidden, _ = units.logits(rows.arrays["q"], rows, keys)
            # Finite, as rows of padding may see nothing.
            logits = jnp.where(hidden, 0.7 * jnp.finfo(units.dtype).min, logits)
            top = reductions.largest(logits, axis=1)[:, None]
            p = jnp.exp(logits - top)
            total = jnp.sum(p, axis=1)
            o = units.product("use,usr->uer", keys.v, p.astype(v.dtype))
            o = (o / total[:, None]).swapaxes(1, 2).astype(q.dtype)
            return {"o": o, "lse": top[:, 0] + jnp.log(total)}

        def of_units(unit: "_Unit"):
            return unit.joined([unit.map(block, band) for band in units.cut.bands])

        out = units.over_units(of_units, {"q": units.by_unit(q)})
        lse = out["lse"].reshape(q.shape[0], q.shape[2], q.shape[1])
        return units.from_units(out["o"]), lse

    @staticmethod
    def backward(
        call: BandedCall,
        residuals: tuple[Float[Array, "B T H E"], Float[Array, "B H T"]],
        cotangents: Float[Array, "B T H E"],
    ) -> BandedCall:
        """Returns gradients in place of the arrays, that of the slopes zero."""
        (q, k, _), units, scale = call[:3], _Units(call), call.options.scale
        (o, lse), do = residuals, cotangents
        delta = jnp.sum(do.astype(units.dtype) * o, axis=-1).swapaxes(1, 2)  # [B, H, T]

        def block(rows: _BandRows, keys: _Keys):
            q, do = rows.arrays["q"], rows.arrays["do"]
            logits, hidden, slope = units.logits(q, rows, keys)
            # Hidden keys are masked first, because their difference may be anything.
            p = jnp.where(hidden, 0.0, jnp.exp(logits - rows.arrays["lse"][:, None]))
            dp = units.product("use,ure->usr", keys.v, do)
            d_logits = scale * slope * p * (dp - rows.arrays["delta"][:, None])
            d_logits = d_logits.astype(q.dtype)
            return (
                units.product("use,usr->uer", keys.k, d_logits).swapaxes(1, 2),
                units.product("usr,ure->use", d_logits, q),
                units.product("usr,ure->use", p.astype(q.dtype), do),
            )

        def of_units(unit: "_Unit"):
            sums = unit.no_gradients()
            parts = []
            for band in units.cut.bands:
                sums, part = unit.scan(block, band, sums)
                parts.append(part)
            dk, dv = unit.whole_rows(sums)
            return unit.joined(parts) | {"dk": dk, "dv": dv}

        arrays = {
            "q": units.by_unit(q),
            "do": units.by_unit(do.astype(q.dtype)),
            "lse": lse.reshape(units.count, units.share, -1),
            "delta": delta.reshape(units.count, units.share, -1),
        }
        out = units.over_units(of_units, arrays)
        B, T, K, E = k.shape
        dk, dv = (
            out[name].reshape(B, K, T, E).swapaxes(1, 2).astype(k.dtype)
            for name in ("dk", "dv")
        )
        slopes = call.slopes
        d_slopes = None if slopes is None else jnp.zeros_like(slopes)
        dq = units.from_units(out["dq"])
        return call._replace(q=dq, k=dk, v=dv, segments=None, slopes=d_slopes)


class _Units:
    """A call as B K units, each a key head of one row and the queries that read it."""

    def __init__(self, call: BandedCall):
        q, k, v, segments, slopes, options = call
        B, T, H, E = q.shape
        K = k.shape[2]
        self.shape, self.count, self.share = q.shape, B * K, H // K
        self.options = options
        self.dtype = jnp.promote_types(q.dtype, jnp.float32)
        self.cut: BandCut = choose_cut(
            self.count,
            self.share,
            T,
            options.window,
            few_cores=target.computes_on_few_cores(),
        )
        # There are no tokens before the first and after the last one, but a block at
        # either end reads as many keys as any other.
        room = ((0, 0), (self.cut.before, self.cut.after))
        self.keys = {
            name: jnp.pad(x.swapaxes(1, 2).reshape(-1, T, E), (*room, (0, 0)))
            for name, x in (("k", k), ("v", v))
        }
        self.rows: dict[str, Array] = {}
        if segments is not None:
            by_unit = jnp.repeat(segments, K, axis=0)
            self.keys["segments"] = jnp.pad(by_unit, room)
            self.rows["segments"] = jnp.repeat(by_unit[:, None], self.share, axis=1)
        self.slopes = None
        if slopes is not None:
            by_unit = jnp.tile(slopes.reshape(K, self.share), (B, 1))
            self.slopes = by_unit.astype(self.dtype)

    def by_unit(self, x: Float[Array, "B T H E"]) -> Float[Array, "u share T E"]:
        T, E = x.shape[1], x.shape[3]
        return x.swapaxes(1, 2).reshape(self.count, self.share, T, E)

    def from_units(self, x: Float[Array, "u share T E"]) -> Float[Array, "B T H E"]:
        B, T, H, E = self.shape
        return x.reshape(B, H, T, E).swapaxes(1, 2)

    def over_units(self, function: Callable[["_Unit"], Any], arrays: dict[str, Array]):
        """Maps `function` over the units, as many at a time as the cut says."""
        rows = {name: self._padded(x) for name, x in (arrays | self.rows).items()}
        parts = (self.keys, rows, self.slopes)
        at_once = self.cut.units
        if at_once == self.count:
            return function(_Unit(self, *parts))
        folded = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), parts)
        out = jax.lax.map(lambda part: function(_Unit(self, *part)), folded)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)

    def logits(self, q: Array, rows: _BandRows, keys: _Keys):
        """Returns logits [units, S, r], what is hidden, and the soft cap's slope."""
        options = self.options
        logits = options.scale * self.product("use,ure->usr", keys.k, q)
        slope: Array | float = 1.0
        if options.soft_cap is not None:
            tanh = jnp.tanh(logits / options.soft_cap)
            logits, slope = options.soft_cap * tanh, 1 - tanh**2
        s, t = keys.s[:, None], rows.t
        if rows.slopes is not None:
            distance = t.astype(self.dtype) - s.astype(self.dtype)
            logits = logits - rows.slopes[:, None] * distance
        hidden = s > t
        if options.window is not None:
            hidden = hidden | (t - s > options.window) | (s < 0)
        if rows.segments is not None and keys.segments is not None:
            hidden = hidden | (keys.segments[:, :, None] != rows.segments[:, None])
        return logits, hidden, slope

    def product(self, subscripts: str, a: Array, b: Array) -> Array:
        return jnp.einsum(subscripts, a, b, preferred_element_type=self.dtype)

    def _padded(self, x: Array) -> Array:
        missing = self.cut.padded - x.shape[2]
        return jnp.pad(x, ((0, 0), (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 3)))


class _Unit(NamedTuple):
    """Some units of a call: all of their keys, and the queries to cut into bands."""

    units: _Units
    keys: dict[str, Array]
    rows: dict[str, Array]
    slopes: Array | None

    def map(self, block: Callable[[_BandRows, _Keys], Any], band: Band):
        """Runs a block at a time; what it returns, for each block of the band."""
        run = lambda rows: block(rows, self._seen(rows, band))  # noqa: E731
        return jax.lax.map(run, self._blocks(band))

    def scan(self, block: Callable[[_BandRows, _Keys], Any], band: Band, sums):
        """Does the same, and adds each block's gradients of its keys to (dk, dv)."""

        def step(sums, rows: _BandRows):
            dq, *parts = block(rows, self._seen(rows, band))
            at = self._first_key(rows, band)
            sums = [_add(x, at, part) for x, part in zip(sums, parts, strict=True)]
            return sums, {"dq": dq}

        return jax.lax.scan(step, sums, self._blocks(band))

    def no_gradients(self) -> list[Array]:
        return [jnp.zeros(self.keys[n].shape, self.units.dtype) for n in "kv"]

    def whole_rows(self, sums: list[Array]) -> list[Array]:
        cut, T = self.units.cut, self.units.shape[1]
        return [x[:, cut.before : cut.before + T] for x in sums]

    def joined(self, parts: list[dict[str, Array]]) -> dict[str, Array]:
        """Turns bands of [blocks, units, r, ...] into [units, share, T, ...]."""
        share, T = self.units.share, self.units.shape[1]

        def join(*bands: Array) -> Array:
            pieces = []
            for x in bands:
                x = x.reshape(*x.shape[:2], share, -1, *x.shape[3:])
                x = jnp.moveaxis(x, 0, 2)  # [units, share, blocks, rows, ...]
                pieces.append(x.reshape(*x.shape[:2], -1, *x.shape[4:]))
            return jnp.concatenate(pieces, axis=2)[:, :, :T]

        return jax.tree.map(join, *parts)

    def _blocks(self, band: Band) -> _BandRows:
        """Cuts the band's queries to [blocks, units, r, ...]."""
        size, share = self.units.cut.rows, self.units.share
        arrays = {}
        for name, x in self.rows.items():
            x = x[:, :, band.first : band.first + band.blocks * size]
            x = x.reshape(*x.shape[:2], band.blocks, size, *x.shape[3:])
            x = jnp.moveaxis(x, 2, 0)  # [blocks, units, share, rows, ...]
            arrays[name] = x.reshape(*x.shape[:2], -1, *x.shape[4:])
        start = band.first + size * jnp.arange(band.blocks)
        t = jnp.tile(start[:, None] + jnp.arange(size), (1, share))
        slopes = None
        if self.slopes is not None:
            by_row = jnp.repeat(self.slopes, size, axis=1)
            slopes = jnp.broadcast_to(by_row, (band.blocks, *by_row.shape))
        return _BandRows(start, t, arrays, arrays.pop("segments", None), slopes)

    def _seen(self, rows: _BandRows, band: Band) -> _Keys:
        at = self._first_key(rows, band)
        take = partial(jax.lax.dynamic_slice_in_dim, slice_size=band.keys, axis=1)
        seen = {name: take(x, start_index=at) for name, x in self.keys.items()}
        s = at - self.units.cut.before + jnp.arange(band.keys)
        return _Keys(s, seen["k"], seen["v"], seen.get("segments"))

    def _first_key(self, rows: _BandRows, band: Band) -> Array | int:
        # Padding before the keys moves them by as much as a window reaches back.
        return rows.start if band.slides else 0


def _add(sums: Array, at: Array | int, part: Array) -> Array:
    """Adds `part` to the keys from number `at` on."""
    part = part + jax.lax.dynamic_slice_in_dim(sums, at, part.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(sums, part, at, axis=1)


def _find_cut(call: BandedCall) -> MeshCut | None:
    return find_cut(call.q.shape[0], call.k.shape[2])


def _specs(cut: MeshCut, call: BandedCall, backend: str) -> dispatch.Specs:
    del backend
    heads = P(cut.by_row, None, cut.columns)
    of_call = call._replace(
        q=heads,
        k=heads,
        v=heads,
        segments=None if call.segments is None else P(cut.by_row),
        slopes=None if call.slopes is None else P(cut.columns),
    )
    return dispatch.Specs(of_call, heads, P(cut.by_row, cut.columns))


_OP = dispatch.Op(
    name="attend_in_bands",
    backends={"cpu": cpu_attention, "xla": _Backend},
    find_cut=_find_cut,
    specs=_specs,
    reads_outputs=True,
    # The compiler alone would gather the rows of every device for a loop over heads.
    cuts_xla=True,
)


def choose_cut(
    units: int, share: int, length: int, window: int | None, *, few_cores: bool
) -> BandCut:
    """Returns the cut for `units` units of `share` heads and `length` tokens.

    Args:
      few_cores: one unit at a time, its logits in cache; else as many as memory allows.
    """
    if window is not None and window < length - 1:
        return _sliding(units, share, length, window, few_cores)
    budget = _IN_CACHE if few_cores else _IN_MEMORY
    at_once = 1 if few_cores else _divisor(units, budget // (share * length * 64))
    rows = _rows(budget // (at_once * share * length), -(-length // _BANDS), length)
    blocks = -(-length // (rows * _BANDS))
    size = rows * blocks
    count = -(-length // size)
    bands = tuple(
        Band(
            first=i * size,
            blocks=blocks,
            keys=min((i + 1) * size, length),
            slides=False,
        )
        for i in range(count)
    )
    return BandCut(
        units=at_once,
        rows=rows,
        bands=bands,
        padded=count * size,
        before=0,
        after=0,
    )


def _sliding(
    units: int, share: int, length: int, window: int, few_cores: bool
) -> BandCut:
    # A quarter of the window: few keys outside it, and each key is read five times.
    budget = _IN_CACHE if few_cores else _IN_MEMORY
    seen = min(length, 2 * window + 1)
    at_once = 1 if few_cores else _divisor(units, budget // (share * seen * 64))
    rows = _rows(budget // (at_once * share * seen), -(-window // 4), length)
    blocks = -(-length // rows)
    padded = rows * blocks
    band = Band(first=0, blocks=blocks, keys=window + rows, slides=True)
    return BandCut(
        units=at_once,
        rows=rows,
        bands=(band,),
        padded=padded,
        before=window,
        after=padded - length,
    )


def _rows(fitting: int, wished: int, length: int) -> int:
    rows = min(max(min(fitting, wished), _LEAST_ROWS), length)
    rounded = -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
    return min(rounded, length)


def _divisor(size: int, most: int) -> int:
    """Returns the largest divisor of `size` up to `most`, at least 1."""
    return next(n for n in range(min(size, max(most, 1)), 0, -1) if size % n == 0)
