"""The definition, with the full mask; for tests, docs and bench."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.chunk_attention.call import Array, ChunkEnds


def chunk_attention_reference(
    q: Float[Array, "B T N E"],
    own_logits: Float[Array, "B T H"],
    own_values: Float[Array, "B T H E"],
    ends: ChunkEnds,
    *,
    chunk: int,
    scale: float,
    first: Int[Array, " B"] | None = None,
    documents: Int[Array, "B T"] | None = None,
):
    """Returns o [B, T, H, E] in at least float32: see `chunk_attention`."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q, own_logits, own_values = (x.astype(dtype) for x in (q, own_logits, own_values))
    keys, values = ends.keys.astype(dtype), ends.values.astype(dtype)
    B, T, H = own_logits.shape
    q = jnp.tile(q, (1, 1, H // q.shape[2], 1))
    own_chunk = jnp.arange(T) // chunk
    own_chunk = own_chunk[None] + (0 if first is None else first[:, None])
    seen = jnp.arange(keys.shape[2]) < own_chunk[..., None]  # [B, T, S]
    if documents is not None and ends.documents is not None:
        seen = seen & (ends.documents[:, None] == documents[..., None])
    logits = jnp.einsum("bthe,bhse->bhts", q, keys)
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    self_logits = own_logits.swapaxes(1, 2)[..., None]
    weights = jax.nn.softmax(
        scale * jnp.concatenate([logits, self_logits], axis=-1), axis=-1
    )
    o = jnp.einsum("bhts,bhse->bthe", weights[..., :-1], values)
    return o + weights[..., -1].swapaxes(1, 2)[..., None] * own_values
