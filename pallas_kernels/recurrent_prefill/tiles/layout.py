"""The layout of rows, positions and cached pairs for the Pallas kernels.

Kernels read full programs of rows and full tiles of positions; what is added is zeros,
which no norm makes infinite, and is cut off again.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num

from pallas_kernels.recurrent_prefill.call import Array, LayerSpec, RecurrentCache
from pallas_kernels.recurrent_prefill.equations import (
    PreparedWeights,
    Rotary,
    linear,
    norm_and_rotate,
    pre_norm,
    rotation,
)


class Active(NamedTuple):
    """The layers of a wavefront that have a tile at a step; others are skipped.

    Attributes:
      layers: 1 or 0, int32 [L]. What is computed of the others has no meaning.
      share: share of the layers that are active, on average over all steps.
    """

    layers: Int[Array, " L"]
    share: float

    @classmethod
    def at(cls, index: Int[Array, " L"], tiles: int) -> "Active | None":
        """Returns those of a step at which each layer is at tile `index`.

        Args:
          tiles: tiles that a layer has; before the first and after the last one it is
            idle.

        Returns:
          None for a single layer, which is never idle.
        """
        L = index.shape[0]
        if L == 1:
            return None
        active = (index >= 0) & (index < tiles)
        return cls(active.astype(jnp.int32), tiles / (tiles + L - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Block sizes: what shapes are rounded up to.

    Attributes:
      tile: b, positions of one tile.
      rows: rows of the batch in one program; the batch is padded to a multiple of it.
      keys: slots of the prefix that are read at once, at most.
    """

    tile: int
    rows: int
    keys: int

    def pad_rows(self, array: Num[Array, "..."], *, batch: int) -> Num[Array, "..."]:
        """Pads axis `batch` to full programs."""
        return _pad_to(array, batch, self.rows)

    def whole_tiles(
        self, rows: Num[Array, "..."], *, time: int, batch: int
    ) -> Num[Array, "..."]:
        """Pads axis `time` to full tiles and axis `batch` to full programs."""
        return self.pad_rows(_pad_to(rows, time, self.tile), batch=batch)

    def start(self, cache: RecurrentCache) -> Int[Array, " rows"]:
        """Returns how many positions each row has seen, [rows]."""
        start = cache.position if cache.slots else jnp.zeros_like(cache.position)
        return self.pad_rows(start, batch=0)

    def rotation(
        self, cache: RecurrentCache, positions: int, spec: LayerSpec
    ) -> Rotary | None:
        """Returns cos and sin of full tiles, [T, rows or 1, 1, rope_width / 2].

        Without a cache all rows stand at the same positions: one serves for all.
        """
        start = self.start(cache) if cache.slots else jnp.zeros(1, jnp.int32)
        steps = jnp.arange(-(-positions // self.tile) * self.tile)[:, None]
        return rotation(start + steps, spec, jnp.float32)

    def training_shape(
        self, layers: int, positions: int, rows: int, spec: LayerSpec
    ) -> tuple[int, int, int, int]:
        """Returns the shape of the training cache's keys: `cached_slots` lays it out.

        As many slots as the full tiles have positions, because the last tile is written
        in full, rounded up to full chunks.
        """
        padded = -(-positions // self.tile) * self.tile
        padded += -padded % self.keys
        return layers, rows, padded, spec.key_heads * spec.head_width

    def cached_slots(
        self, cache: RecurrentCache, positions: int, spec: LayerSpec
    ) -> tuple[Float[Array, "L rows S KE"], Float[Array, "L rows S KE"]]:
        """Lays keys and values out as [L, rows, S, K E], S full chunks.

        The training cache gets as many slots as the full tiles have positions: the last
        tile is written in full.
        """

        def lay_out(pairs: Array) -> Array:
            L, B, S = pairs.shape[:3]
            pairs = pairs.reshape(L, B, S, spec.key_heads * spec.head_width)
            missing = 0 if S else self.training_shape(L, positions, B, spec)[2]
            pairs = jnp.pad(
                pairs.astype(spec.dtype), ((0, 0), (0, 0), (0, missing), (0, 0))
            )
            return self.pad_rows(_pad_to(pairs, 2, self.keys), batch=1)

        return lay_out(cache.keys), lay_out(cache.values)


def from_slots(
    pairs: Float[Array, "L rows S_padded KE"], like: Float[Array, "L B S K E"]
) -> Float[Array, "L B S K E"]:
    """Undoes `Tiles.cached_slots` for the cache's array `like`."""
    B, S = like.shape[1:3]
    return pairs[:, :B, :S].reshape(like.shape).astype(like.dtype)


def put_in_slots(
    old: tuple[Float[Array, "L B S KE"], Float[Array, "L B S KE"]],
    new: tuple[Float[Array, "L b B KE"], Float[Array, "L b B KE"]],
    start: Int[Array, " B"],
    done: Int[Array, " L"],
    active: Bool[Array, " L"],
    positions: int,
) -> tuple[Float[Array, "L B S KE"], Float[Array, "L B S KE"]]:
    """Puts pairs [L, t, B, K E] of positions `done` on into slots of [L, B, S, K E].

    Args:
      start: how many slots of each row are filled, [B].
      done, active: by layer, [L].
      positions: T; entries beyond it, and results of inactive layers, are dropped.
    """
    L, b, B, _ = new[0].shape
    # Out of range: dropped.
    t = done[:, None] + jnp.arange(b)  # [L, b]
    real = (active[:, None] & (t < positions))[:, None]
    at = jnp.where(real, start[:, None] + t[:, None], old[0].shape[2])  # [L, B, b]
    index = (jnp.arange(L)[:, None, None], jnp.arange(B)[:, None], at)
    keys, values = (
        slots.at[index].set(pairs.swapaxes(1, 2), mode="drop")
        for slots, pairs in zip(old, new, strict=True)
    )
    return keys, values


def put_in_order(
    old: tuple[Float[Array, "L B S KE"], Float[Array, "L B S KE"]],
    new: tuple[Float[Array, "L t B KE"], Float[Array, "L t B KE"]],
    first: Int[Array, ""] | int,
    positions: int,
) -> tuple[Float[Array, "L B S KE"], Float[Array, "L B S KE"]]:
    """Like `put_in_slots`, for rows and layers that are all at `first`.

    Slots of one position are one slice, which is written in place; to scatter by row
    and layer XLA would first transpose both arrays for every tile.

    Args:
      old: in training: anything from `first` on.
      positions: T; zeros are written beyond.
    """
    t = first + jnp.arange(new[0].shape[1])
    real = (t < positions)[:, None]
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(
            slots, jnp.where(real, pairs.swapaxes(1, 2), 0), first, axis=2
        )
        for slots, pairs in zip(old, new, strict=True)
    )
    return keys, values


def _pad_to(array: Array, axis: int, unit: int) -> Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % unit)
    return jnp.pad(array, widths)


def queries_and_pairs(
    x: Float[Array, "L T B D"],
    w: PreparedWeights,
    spec: LayerSpec,
    rotary: Rotary | None = None,
) -> tuple[
    Float[Array, "L T B HE"], Float[Array, "L T B KE"], Float[Array, "L T B KE"]
]:
    """Projects rows [L, T, B, D] into q, temporary k and v, [L, T, B, heads E].

    Args:
      rotary: at the rows' positions, where the layer has RoPE.
    """
    H, K, E = spec.heads, spec.key_heads, spec.head_width
    normed = pre_norm(x, w.attention_norm, spec)
    flat = linear(normed, w.w_qkv, w.b_qkv, narrow=True)
    q, k, v = jnp.split(flat, [H * E, (H + K) * E], axis=-1)
    q = norm_and_rotate(q, w.q_norm, rotary, spec).reshape(q.shape)
    k = norm_and_rotate(k, w.k_norm, rotary, spec).reshape(k.shape)
    return q.astype(spec.dtype), k.astype(spec.dtype), v.astype(spec.dtype)


class Vectors(NamedTuple):
    """Biases and norm parameters as the kernels read them: float32, none missing."""

    b_out: Array
    b_in: Array
    b_down: Array
    b_kv: Array
    attention_norm: tuple[Array, Array]
    mlp_norm: tuple[Array, Array]
    k_norm: tuple[Array, Array]

    @classmethod
    def of(cls, w: PreparedWeights, spec: LayerSpec, width: int) -> "Vectors":
        L = w.w_kv.shape[0]

        def bias(vector: Array | None, size: int) -> Array:
            return (
                jnp.zeros((L, size)) if vector is None else vector.astype(jnp.float32)
            )

        def norm(parameters, size: int) -> tuple[Array, Array]:
            scale, shift = parameters
            scale = jnp.ones((L, size)) if scale is None else scale
            return scale.astype(jnp.float32), bias(shift, size)

        pair = w.w_kv.shape[2]
        source = w.attention_norm if spec.normed_persistent else (None, None)
        return cls(
            b_out=bias(w.b_out, width),
            b_in=bias(w.b_in, w.w_in.shape[2]),
            b_down=bias(w.b_down, width),
            b_kv=bias(w.b_kv, pair),
            attention_norm=norm(source, width),
            mlp_norm=norm(w.mlp_norm, width),
            k_norm=norm(w.k_norm, pair // 2),
        )
