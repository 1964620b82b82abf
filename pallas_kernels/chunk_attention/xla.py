"""The XLA backend: in bands where logits are few, in tiles where they are many."""

from jaxtyping import Float

from pallas_kernels import target
from pallas_kernels.chunk_attention import xla_bands, xla_tiles
from pallas_kernels.chunk_attention.call import Array, ChunkAttentionCall
from pallas_kernels.chunk_attention.xla_cuts import Tiles, choose_tiles


def supported(call: ChunkAttentionCall) -> str | None:
    """Returns which size it has no use for; it does everything else."""
    taken = ("block_q", "block_k") if _on_cpu() else ()
    return call.options.blocks.refusal_beyond(*taken)


def forward(
    call: ChunkAttentionCall, *, residuals: bool
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T H"]]:
    """Returns o and the log-sum-exp."""
    del residuals  # What nobody reads the compiler leaves out.
    tiles = _tiles(call)
    if tiles is None:
        return xla_bands.forward(call)
    return xla_tiles.forward(call, tiles)


def backward(
    call: ChunkAttentionCall,
    residuals: tuple[Float[Array, "B T H E"], Float[Array, "B T H"]],
    cotangents: Float[Array, "B T H E"],
) -> ChunkAttentionCall:
    """Returns gradients in place of the arrays."""
    tiles = _tiles(call)
    if tiles is None:
        return xla_bands.backward(call, *residuals, cotangents)
    return xla_tiles.backward(call, *residuals, cotangents, tiles)


def _tiles(call: ChunkAttentionCall) -> Tiles | None:
    """Returns the tiles that the call is cut into, None: it is cut into bands."""
    if not _on_cpu():
        return None
    blocks = call.options.blocks
    return choose_tiles(call.q.shape[1], call.ends.keys.shape[2], blocks)


def _on_cpu() -> bool:
    # Tiles run one after the other, which suits a few cores and nothing wider.
    return target.current().platform == "cpu"
