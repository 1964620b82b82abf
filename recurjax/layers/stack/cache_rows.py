"""Rows of a cache emptied and filled, whatever the cache holds.

An engine keeps a row for each request: when one ends, its row is emptied and another
request's prefilled row takes its place, while the neighbours decode on. Which axis of
an array counts the rows differs (keys have the layers in front, positions do not); it
is the one axis that grows with the batch, so nobody has to write it down a second time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from recurjax.types import Array, Cache


class CacheRows:
    """Gives a stack with `init_cache` the three methods on a cache's rows."""

    def init_cache(self, batch: int, length: int, dtype) -> Cache:
        """Makes an empty cache: the stack's own method."""
        raise NotImplementedError

    def reset(self, cache: Cache, rows: Bool[Array, " B"]) -> Cache:
        """Makes the chosen rows as `init_cache` made them: at position 0, all zeros.

        Keys that nobody sees any more are cleared too: a masked weight of zero times
        what a diverged row left behind would still be not a number.
        """

        def clear(leaf: Array, axis: int) -> Array:
            if axis < 0:
                return leaf
            shape = [1] * leaf.ndim
            shape[axis] = -1
            return jnp.where(rows.reshape(shape), jnp.zeros((), leaf.dtype), leaf)

        return jax.tree.map(clear, cache, self._row_axes(cache))

    def insert(self, cache: Cache, row: Int[Array, ""] | int, other: Cache) -> Cache:
        """Puts the one row of `other` into place `row`; the rest stays to the bit.

        Args:
          other: a cache of batch 1, made for the same length and dtype.

        Raises:
          ValueError: the caches do not fit.
        """

        def put(leaf: Array, new: Array, axis: int) -> Array:
            if axis < 0:
                return leaf
            wanted = (*leaf.shape[:axis], 1, *leaf.shape[axis + 1 :])
            if new.shape != wanted or new.dtype != leaf.dtype:
                raise ValueError(
                    f"insert: wants a cache of one row for the same length, with "
                    f"{wanted} of {leaf.dtype}, got {new.shape} of {new.dtype}"
                )
            return jax.lax.dynamic_update_slice_in_dim(leaf, new, row, axis)

        return jax.tree.map(put, cache, other, self._row_axes(cache))

    def take(self, cache: Cache, rows: Int[Array, " N"]) -> Cache:
        """Makes a cache of the chosen rows, in this order; one may come several times.

        So a prompt is read once for several continuations of it.
        """

        def pick(leaf: Array, axis: int) -> Array:
            return leaf if axis < 0 else jnp.take(leaf, rows, axis=axis)

        return jax.tree.map(pick, cache, self._row_axes(cache))

    def _row_axes(self, cache: Cache) -> Any:
        """Returns the axis of each array that counts rows; -1 where none does."""
        # Two caches of one row and of two differ in one axis each; nothing is allocated
        # for it.
        one, two = (
            jax.eval_shape(lambda batch=batch: self.init_cache(batch, 1, jnp.float32))
            for batch in (1, 2)
        )
        axes = jax.tree.map(_grown_axis, one, two)
        assert jax.tree.structure(axes) == jax.tree.structure(cache)
        return axes


def _grown_axis(one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> int:
    sizes = zip(one.shape, two.shape, strict=True)
    # What has no axis of rows, such as a counter of all of them, is left as it is.
    return next((axis for axis, (a, b) in enumerate(sizes) if a != b), -1)
