"""The XLA backend: in bands where logits are few, in tiles where they are many."""

from jaxtyping import Float, Int

from pallas_kernels import target
from pallas_kernels.chunk_attention import xla_bands, xla_tiles
from pallas_kernels.chunk_attention.arrays import Array, ChunkEnds
from pallas_kernels.chunk_attention.block_sizes import BlockSizes, choose
from pallas_kernels.chunk_attention.xla_cuts import Tiles, choose_tiles


def supported(
    q, own_logits, own_values, ends, first, documents, *, chunk, scale, blocks=None
) -> str | None:
    """Returns which size it has no use for; it does everything else."""
    call = (q, own_logits, ends, first, documents)
    blocks = choose("xla", *call, chunk=chunk, blocks=blocks)
    return blocks.refusal_beyond(*(("block_q", "block_k") if _on_cpu() else ()))


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
    blocks: BlockSizes | None = None,
):
    """Returns (o [B, T, H, E], log-sum-exp [B, T, H])."""
    arrays = (q, own_logits, own_values, ends, first, documents)
    tiles = _tiles(*arrays, chunk=chunk, blocks=blocks)
    if tiles is None:
        return xla_bands.forward(*arrays, chunk=chunk, scale=scale)
    return xla_tiles.forward(*arrays, chunk=chunk, scale=scale, tiles=tiles)


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
    blocks: BlockSizes | None = None,
):
    """Returns gradients of (q, own_logits, own_values, keys, values)."""
    arrays = (q, own_logits, own_values, ends, first, documents)
    tiles = _tiles(*arrays, chunk=chunk, blocks=blocks)
    arrays = (*arrays, o, lse, do)
    if tiles is None:
        return xla_bands.backward(*arrays, chunk=chunk, scale=scale)
    return xla_tiles.backward(*arrays, chunk=chunk, scale=scale, tiles=tiles)


def _tiles(
    q, own_logits, own_values, ends, first, documents, *, chunk, blocks
) -> Tiles | None:
    """Returns the tiles that the call is cut into, None: it is cut into bands."""
    if not _on_cpu():
        return None
    call = (q, own_logits, ends, first, documents)
    blocks = choose("xla", *call, chunk=chunk, blocks=blocks)
    return choose_tiles(q.shape[1], ends.keys.shape[2], blocks)


def _on_cpu() -> bool:
    # Tiles run one after the other, which suits a few cores and nothing wider.
    return target.current().platform == "cpu"
