"""Looks up a table's rows by token on a mesh that shards both."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from pallas_kernels.mesh_cut import free_axes, row_axes
from recurjax.types import Array

_SHARED = "fsdp"
"""The axis whose devices see different rows and share one copy's parameters."""


def look_up(
    table: Float[Array, "V ..."], ids: Int[Array | np.ndarray, "B T"], dtype
) -> Float[Array, "B T ..."]:
    """Reads x[b, t] = table[ids[b, t]] in `dtype`; the gradient is summed in table's.

    By default under `fsdp`, the compiler gathers the table on every device and sums its
    full gradient over all of them. Here a device reads its share of the columns for all
    rows of its group, then the group exchanges columns for rows. It sends as many bytes
    as x has, and sums only a device's share of the gradient over `data`.
    """
    rows, free = row_axes(ids.shape[0]), free_axes()
    shards, sizes = free.get(_SHARED, 1), table.shape
    columns = math.prod(sizes[1:])
    # As the sharding rules cut them: [V, D] by columns, [V, K, E] by tokens.
    spec = P(None, _SHARED) if table.ndim == 2 else P(_SHARED)
    divides = columns % shards == 0 and (table.ndim == 2 or sizes[0] % shards == 0)
    # Another axis in play (tensor, stage, sequence), or a table that does not divide:
    # the compiler's own way, which is right everywhere and only slower.
    if _SHARED not in rows or set(free) != set(rows) or not divides:
        return table[ids].astype(dtype)
    x = jax.shard_map(
        partial(_look_up_share, dtype=dtype),
        in_specs=(spec, P(rows)),
        out_specs=P(rows),
        axis_names=set(rows),
        check_vma=False,
    )(table, jnp.asarray(ids))
    return x.reshape(*ids.shape, *sizes[1:])


def _look_up_share(share: Array, ids: Array, dtype) -> Array:
    """Returns [b, T, N] for a device's own rows from its share of a table."""
    if share.ndim > 2:  # of tokens: exchanged for one of columns
        share = share.reshape(share.shape[0], -1)
        share = _exchange(share, split_axis=1, concat_axis=0)
    # Ids are small: each device gathers those of its group, reads its columns for all
    # of their rows, and exchanges columns for rows.
    of_group = jax.lax.all_gather(ids, _SHARED, axis=0, tiled=True)
    return _exchange(share[of_group].astype(dtype), split_axis=0, concat_axis=2)


_exchange = partial(jax.lax.all_to_all, axis_name=_SHARED, tiled=True)
