"""The XLA backend: in bands where logits are few, in tiles where they are many."""

from jaxtyping import Float, Int

from pallas_kernels import target
from pallas_kernels.chunk_attention import xla_bands, xla_tiles
from pallas_kernels.chunk_attention.arrays import Array, ChunkEnds
from pallas_kernels.chunk_attention.xla_cuts import choose_tiles


def supported(
    q, own_logits, own_values, ends, first, documents, *, chunk, scale
) -> str | None:
    """Returns None: this backend does everything."""
    return None


def forward(
    q: Float[Array, "B T N E"],
    own_logits: Float[Array, "B T H"],
    own_values: Float[Array, "B T H E"],
    ends: ChunkEnds,
    first: Int[Array, " B"] | None,
    documents: Int[Array, "B T"] | None,
    *,
    chunk: int,
    scale: float,
):
    """Returns (o [B, T, H, E], log-sum-exp [B, T, H])."""
    return _way(q, ends).forward(
        *(q, own_logits, own_values, ends, first, documents), chunk=chunk, scale=scale
    )


def backward(
    q: Float[Array, "B T N E"],
    own_logits: Float[Array, "B T H"],
    own_values: Float[Array, "B T H E"],
    ends: ChunkEnds,
    first: Int[Array, " B"] | None,
    documents: Int[Array, "B T"] | None,
    o: Float[Array, "B T H E"],
    lse: Float[Array, "B T H"],
    do: Float[Array, "B T H E"],
    *,
    chunk: int,
    scale: float,
):
    """Returns gradients of (q, own_logits, own_values, keys, values)."""
    return _way(q, ends).backward(
        *(q, own_logits, own_values, ends, first, documents, o, lse, do),
        chunk=chunk,
        scale=scale,
    )


def _way(q, ends):
    # Tiles run one after the other, which suits a few cores and nothing wider.
    on_cpu = target.current().platform == "cpu"
    cut = choose_tiles(q.shape[1], ends.keys.shape[2]) if on_cpu else None
    return xla_bands if cut is None else xla_tiles
