"""The XLA backend where logits are many: tiles of positions and ends, head by head.

A loop over heads and tiles of positions; inside it, one over the tiles of ends that
these see, whose number is an index's affair: hidden tiles cost nothing, and the program
has one size whatever T is. The softmax is kept in parts, so that logits stay in cache.
Tiles of ends that all positions see need no mask.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels import reductions
from pallas_kernels.chunk_attention.call import Array, ChunkAttentionCall
from pallas_kernels.chunk_attention.visibility import cdiv, seen_ends, sees
from pallas_kernels.chunk_attention.xla_cuts import Tiles


def forward(
    call: ChunkAttentionCall, tiles: Tiles
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T H"]]:
    """Returns o and the log-sum-exp."""
    q, own_logits, own_values = call[:3]
    tiled = _TiledCall(call, tiles)

    def tile(head: "_Head", rows: "_Rows"):
        def add_block(j, running, masked: bool):
            largest, normalizer, weighted = running
            logits, _, v = head.logits(j, rows, masked)
            above = jnp.maximum(largest, reductions.largest(logits))
            shrink = jnp.exp(largest - above)
            p = jnp.exp(logits - above[:, None])
            normalizer = normalizer * shrink + jnp.sum(p, axis=1)
            weighted = weighted * shrink[:, None] + _dot(p.astype(v.dtype), v, (1, 0))
            return above, normalizer, weighted

        own_logit, v = rows.arrays["own"], rows.arrays["v"].astype(tiled.dtype)
        running = head.over_ends(
            rows, add_block, (own_logit, jnp.ones_like(own_logit), v)
        )
        largest, normalizer, weighted = running
        o = (weighted / normalizer[:, None]).astype(own_values.dtype)
        return o, largest + jnp.log(normalizer)

    arrays = {
        "q": tiled.tiled_queries(q),
        "own": tiled.scale * own_logits.astype(tiled.dtype).swapaxes(1, 2),
        "v": own_values.swapaxes(1, 2),
    }
    o, lse = tiled.over_heads(
        lambda head, rows: jax.lax.map(partial(tile, head), rows), arrays
    )
    return tiled.from_tiles(o), tiled.from_tiles(lse)


def backward(
    call: ChunkAttentionCall,
    o: Float[Array, "B T H E"],
    lse: Float[Array, "B T H"],
    do: Float[Array, "B T H E"],
    tiles: Tiles,
) -> ChunkAttentionCall:
    """Returns gradients in place of the arrays."""
    q, own_logits, own_values, ends = call[:4]
    tiled = _TiledCall(call, tiles)
    dtype, scale = tiled.dtype, tiled.scale
    wide = do.astype(dtype)
    delta = jnp.sum(wide * o, axis=-1)  # [B, T, H]
    weight = jnp.exp(scale * own_logits.astype(dtype) - lse)
    d_own_values = weight[..., None] * wide
    d_own_logits = scale * weight * (jnp.sum(wide * own_values, axis=-1) - delta)

    def tile(head: "_Head", sums, rows: "_Rows"):
        q, do = rows.arrays["q"], rows.arrays["do"]
        lse, delta = rows.arrays["lse"][:, None], rows.arrays["delta"][:, None]

        def add_block(j, running, masked: bool):
            dq, d_keys, d_values = running
            logits, k, v = head.logits(j, rows, masked)
            p = jnp.exp(logits - lse)
            d_logits = (scale * p * (_dot(do, v, (1, 1)) - delta)).astype(q.dtype)
            # Narrow times wide: the other way round takes twice as long on a CPU.
            d_keys = _add(d_keys, j, _dot(q, d_logits, (0, 0)))
            d_values = _add(d_values, j, _dot(do, p.astype(q.dtype), (0, 0)))
            return dq + _dot(d_logits, k, (1, 0)), d_keys, d_values

        start = (jnp.zeros(q.shape, dtype), *sums)
        dq, *sums = head.over_ends(rows, add_block, start)
        return tuple(sums), dq

    def of_head(head: "_Head", rows: "_Rows"):
        none = jnp.zeros(head.keys.shape[::-1], dtype)  # [E, S]
        return jax.lax.scan(partial(tile, head), (none, none), rows)

    arrays = {
        "q": tiled.tiled_queries(q),
        "do": do.astype(q.dtype).swapaxes(1, 2),
        "lse": lse.swapaxes(1, 2),
        "delta": delta.swapaxes(1, 2),
    }
    (d_keys, d_values), dq = tiled.over_heads(of_head, arrays)
    B, T, N, E = q.shape
    dq = jnp.sum(tiled.from_tiles(dq).reshape(B, T, -1, N, E), axis=2)
    S = ends.keys.shape[2]
    d_keys, d_values = (
        x.reshape(B, -1, *x.shape[1:])[..., :S].swapaxes(2, 3)
        for x in (d_keys, d_values)
    )
    return call.with_gradients(dq, d_own_logits, d_own_values, d_keys, d_values)


class _Rows(NamedTuple):
    """A tile of positions, or all of a head's with an axis of tiles in front.

    Attributes:
      start: the tile's first position.
      arrays: what `over_heads` was given, and the positions' documents.
    """

    start: Array
    arrays: dict[str, Array]


class _Head(NamedTuple):
    """One head's ends, padded to full tiles, and what a tile needs for its mask."""

    tiled: "_TiledCall"
    keys: Array
    values: Array
    first: Array
    documents: Array | None

    def over_ends(self, rows: _Rows, add_block, running):
        """Runs `add_block(j, running, masked)` over the tiles of ends `rows` see."""
        tiled, tiles = self.tiled, self.tiled.tiles
        seen = partial(seen_ends, self.first, chunk=tiled.chunk, ends=tiled.ends)
        unmasked = (
            0 if self.documents is not None else seen(rows.start) // tiles.block_k
        )
        last = jnp.minimum(rows.start + tiles.block_q, tiled.length) - 1
        blocks = cdiv(seen(last), tiles.block_k)
        plain = partial(add_block, masked=False)
        running = jax.lax.fori_loop(0, unmasked, plain, running)
        return jax.lax.fori_loop(
            unmasked, blocks, partial(add_block, masked=True), running
        )

    def logits(self, j, rows: _Rows, masked: bool):
        """Returns a tile's logits [rows, ends], and the keys and values of its ends."""
        tiled, tiles = self.tiled, self.tiled.tiles
        k, v = (
            jax.lax.dynamic_slice_in_dim(x, j * tiles.block_k, tiles.block_k)
            for x in (self.keys, self.values)
        )
        logits = tiled.scale * _dot(rows.arrays["q"], k, (1, 1))
        if masked:
            t = rows.start + jnp.arange(tiles.block_q)[:, None]
            s = j * tiles.block_k + jnp.arange(tiles.block_k)[None]
            seen = sees(self.first, t, s, chunk=tiled.chunk) & (s < tiled.ends)
            if self.documents is not None:
                documents = jax.lax.dynamic_slice_in_dim(
                    self.documents, j * tiles.block_k, tiles.block_k
                )
                seen = seen & (rows.arrays["documents"][:, None] == documents[None])
            logits = jnp.where(seen, logits, -jnp.inf)
        return logits, k, v


class _TiledCall:
    """A call cut into heads, positions in tiles, ends padded to full tiles."""

    def __init__(self, call: ChunkAttentionCall, tiles: Tiles):
        self.batch, self.length, self.heads = call.own_logits.shape
        self.ends = call.ends.keys.shape[2]
        self.tiles = tiles
        self.chunk, self.scale = call.options.chunk, call.options.scale
        self.dtype = jnp.promote_types(call.q.dtype, jnp.float32)
        self._ends, self._first = call.ends, call.first
        self._documents = call.documents

    def tiled_queries(self, q: Array) -> Array:
        """[B, T, N, E] to [B, H, T, E]: head h has group h mod N."""
        return jnp.tile(q.swapaxes(1, 2), (1, self.heads // q.shape[2], 1, 1))

    def over_heads(self, function, arrays: dict[str, Array]):
        """Maps `function(head, rows)` over B H heads; arrays are [B, H, T, ...]."""
        ends, tiles = self._ends, self.tiles
        rows = {name: self._to_tiles(x) for name, x in arrays.items()}
        count = rows["q"].shape[1]
        starts = tiles.block_q * jnp.arange(count)
        keys, values = (
            self._whole(x, 2, tiles.block_k).reshape(-1, *self._padded_ends(x))
            for x in (ends.keys, ends.values)
        )
        first, documents, known = self._first, self._documents, ends.documents
        if first is None:
            first = jnp.zeros(self.batch, jnp.int32)
        if documents is not None and known is not None:
            by_head = jnp.repeat(documents[:, None], self.heads, axis=1)
            rows["documents"] = self._to_tiles(by_head)
            known = self._whole(known, 1, tiles.block_k)

        def run(inputs):
            number, keys, values, rows = inputs
            row = number // self.heads
            of_row = None if known is None else known[row]
            head = _Head(self, keys, values, first[row], of_row)
            return function(head, _Rows(starts, rows))

        numbers = jnp.arange(self.batch * self.heads)
        return jax.lax.map(run, (numbers, keys, values, rows))

    def from_tiles(self, x: Array) -> Array:
        """Turns [B H, tiles, rows, ...] into [B, T, H, ...]."""
        x = x.reshape(self.batch, self.heads, -1, *x.shape[3:])
        return x[:, :, : self.length].swapaxes(1, 2)

    def _to_tiles(self, x: Array) -> Array:
        x = self._whole(x, 2, self.tiles.block_q)
        return x.reshape(self.batch * self.heads, -1, self.tiles.block_q, *x.shape[3:])

    def _padded_ends(self, x: Array) -> tuple[int, int]:
        return cdiv(x.shape[2], self.tiles.block_k) * self.tiles.block_k, x.shape[3]

    @staticmethod
    def _whole(x: Array, axis: int, size: int) -> Array:
        """Pads an axis with zeros to a multiple of a size."""
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, -x.shape[axis] % size)
        return jnp.pad(x, padding) if padding[axis][1] else x


def _add(sums: Array, j, part: Array) -> Array:
    """Adds to the j-th tile of ends, [E, ends]."""
    at = j * part.shape[1]
    part = part + jax.lax.dynamic_slice_in_dim(sums, at, part.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(sums, part, at, axis=1)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)
