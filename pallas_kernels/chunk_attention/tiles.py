"""How the XLA backend cuts a call: bands of positions, and blocks within a band.

Bands see different numbers of chunk ends, known while tracing, so that the hidden half
of the products is mostly left out; a band's blocks run one after the other and bound
the memory that logits take.
"""

from dataclasses import dataclass

_BAND_LOGITS = 2**19
_BLOCK_LOGITS = 2**22
_MOST_BANDS = 8
_ROW_MULTIPLE = 64  # Products of odd sizes are slow.


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The cut.

    Attributes:
      rows: positions in a block.
      blocks: blocks in a band.
      bands: bands; rows * blocks * bands >= T.
    """

    rows: int
    blocks: int
    bands: int


def choose_tiles(
    batch: int, length: int, heads: int, ends: int, *, causal: bool
) -> Tiles:
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
    return Tiles(rows=rows, blocks=blocks, bands=-(-length // (blocks * rows)))
