"""jax's splash attention for TPUs: its kernels, called as `attend` calls the others."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from pallas_kernels import mesh_cut
from recurjax.layers.attention.alibi_channels import with_alibi_channels
from recurjax.layers.attention.implementation import find_cut
from recurjax.types import Array

_BLOCKS = (512, 256, 128)


def attend_by_splash(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    *,
    scale: float,
    window: int | None,
    segments: Int[Array, "B T"] | None,
    slopes: np.ndarray | None,
    soft_cap: float | None,
    interpret: bool = False,
) -> Float[Array, "B T H E"]:
    """Computes causal attention as `attend` does, in memory of B H T.

    The kernel takes no scale, so queries are scaled before it.

    Args:
      interpret: runs the kernels as plain JAX, on any device.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q = (scale * q.astype(wide)).astype(q.dtype)
    if slopes is not None:
        q, k = with_alibi_channels(q, k, slopes, scale=1.0)
    options = {"window": window, "soft_cap": soft_cap, "interpret": interpret}
    local = partial(_attend, **options)
    cut = find_cut(q.shape[0], k.shape[2])
    if cut is None:
        return local(q, k, v, segments)
    # The compiler refuses to cut a kernel: each device runs it on its own rows and
    # heads.
    heads = P(cut.by_row, None, cut.columns)
    by_row = None if segments is None else P(cut.by_row)
    specs = (heads, heads, heads, by_row)
    return mesh_cut.run(cut, local, specs, heads, q, k, v, segments)


def _attend(q, k, v, segments, *, window, soft_cap, interpret) -> Array:
    # Imported here: only TPUs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, H = q.shape[1:3]
    if window is None:
        mask: Any = splash.CausalMask((T, T))
    else:
        mask = splash.LocalMask((T, T), (window, 0), 0)
    size = next(size for size in _BLOCKS if T % size == 0)
    # dq apart from dk and dv: made with them, its parts would be kept for every block
    # of keys, which is memory of T squared.
    sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * H),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )
    known = None if segments is None else splash.SegmentIds(segments, segments)
    o: Any = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v)), known)
    return o.swapaxes(1, 2)
