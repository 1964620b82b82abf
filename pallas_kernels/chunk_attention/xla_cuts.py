"""The XLA backend's cut of a call: bands, or tiles with a softmax in parts.

Bands see different numbers of chunk ends, known while tracing, so that the hidden half
of the products is mostly left out; a band's blocks run one after the other and bound
the memory that logits take. Bands bound the ends too, so that logits stay in cache.
"""

from dataclasses import dataclass

from pallas_kernels.chunk_attention.call import BlockSizes

_BAND_LOGITS = 2**19
_BLOCK_LOGITS = 2**22
_MOST_BANDS = 8
_ROW_MULTIPLE = 64  # Products of odd sizes are slow.
_TILE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Bands:
    """A cut into bands.

    Attributes:
      block_q: positions in a block.
      blocks: blocks in a band.
      bands: bands; block_q * blocks * bands >= T.
    """

    block_q: int
    blocks: int
    bands: int


def choose_bands(
    batch: int, length: int, heads: int, ends: int, *, causal: bool
) -> Bands:
    """Returns the cut for B, T, H and S.

    A band costs a dozen small programs more, so each has half a million logits; a block
    has about four million, 16 MB, before the hidden ones are left out.
    """
    logits = batch * heads * length * max(ends, 1)
    bands = min(_MOST_BANDS, -(-logits // _BAND_LOGITS), length) if causal else 1
    band_rows = -(-length // bands)
    blocks = min(band_rows, -(-logits // (bands * _BLOCK_LOGITS)))
    rows = -(-band_rows // blocks)
    if rows > _ROW_MULTIPLE:
        rows = -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
    return Bands(block_q=rows, blocks=blocks, bands=-(-length // (blocks * rows)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """A cut into tiles of `block_q` positions and `block_k` chunk ends."""

    block_q: int
    block_k: int


def choose_tiles(
    length: int, ends: int, blocks: BlockSizes | None = None
) -> Tiles | None:
    """Returns the tiles of each head for T and S, or None where bands are better.

    A tile has 512 x 512 logits, 1 MB: least CPU time on two (loaded) cores, forward at
    T = S = 4096, among 256 x 512, 512 x 1024 and 1024 x 1024. With fewer ends, tiles
    are narrower and higher: those that the diagonal crosses are computed in full. A
    head that has one tile, or few positions, would gain nothing.

    Args:
      blocks: sizes in place of these; with any of them a call is cut into tiles.
    """
    sizes = {} if blocks is None else blocks.given()
    few = ends <= _TILE or 2 * length < _TILE
    if not ends or (few and not sizes):
        return None
    width = sizes.get("block_k", min(_TILE, 1 << (ends // 4).bit_length()))
    height = sizes.get("block_q", max(_TILE * _TILE // width, 1))
    return Tiles(block_q=min(height, length), block_k=min(width, ends))
