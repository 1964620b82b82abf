"""How attention in bands cuts a call: which queries at a time, and which keys they see.

Without a window, bands see stretches of keys from the first to the band's own end. With
one, all blocks are alike: each sees its own keys and as many before it as the window
reaches back.
"""

from dataclasses import dataclass

_BANDS = 8
"""The most bands: each is a part of the program. With n of them (n + 1) / 2n of all
logits are computed, where half of them count."""
_LEAST_ROWS, _ROW_MULTIPLE = 64, 16
_IN_CACHE = 2**18
"""Logits of a block on a CPU, 1 MB in float32: they are read three times."""
_IN_MEMORY = 2**24
"""Logits of a block on a device that runs all units at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Blocks of queries.

    Attributes:
      first: position of the first query.
      blocks: how many blocks it has.
      keys: how many keys each block sees.
      slides: whether they move with the block; else they begin at position 0.
    """

    first: int
    blocks: int
    keys: int
    slides: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A call's cut.

    Attributes:
      units: how many units run at once; a divisor of all.
      rows: queries of a head in a block.
      bands: of all queries, the last one filled up with padding.
      padded: T and the padding behind it.
      before, after: keys of padding in front of the first and behind the last.
    """

    units: int
    rows: int
    bands: tuple[Band, ...]
    padded: int
    before: int
    after: int


def choose_cut(
    units: int, share: int, length: int, window: int | None, *, few_cores: bool
) -> Cut:
    """Returns the cut for so many units of `share` heads and `length` tokens.

    Args:
      few_cores: one unit at a time, its logits in cache; else as many as memory allows.
    """
    if window is not None and window < length - 1:
        return _sliding(units, share, length, window, few_cores)
    budget = _IN_CACHE if few_cores else _IN_MEMORY
    at_once = 1 if few_cores else _divisor(units, budget // (share * length * 64))
    rows = _rows(budget // (at_once * share * length), -(-length // _BANDS), length)
    blocks = -(-length // (rows * _BANDS))
    size = rows * blocks
    count = -(-length // size)
    bands = tuple(
        Band(
            first=i * size,
            blocks=blocks,
            keys=min((i + 1) * size, length),
            slides=False,
        )
        for i in range(count)
    )
    return Cut(
        units=at_once,
        rows=rows,
        bands=bands,
        padded=count * size,
        before=0,
        after=0,
    )


def _sliding(units: int, share: int, length: int, window: int, few_cores: bool) -> Cut:
    # A quarter of the window: few keys outside it, and each key is read five times.
    budget = _IN_CACHE if few_cores else _IN_MEMORY
    seen = min(length, 2 * window + 1)
    at_once = 1 if few_cores else _divisor(units, budget // (share * seen * 64))
    rows = _rows(budget // (at_once * share * seen), -(-window // 4), length)
    blocks = -(-length // rows)
    padded = rows * blocks
    band = Band(first=0, blocks=blocks, keys=window + rows, slides=True)
    return Cut(
        units=at_once,
        rows=rows,
        bands=(band,),
        padded=padded,
        before=window,
        after=padded - length,
    )


def _rows(fitting: int, wished: int, length: int) -> int:
    rows = min(max(min(fitting, wished), _LEAST_ROWS), length)
    whole = -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
    return min(whole, length)


def _divisor(whole: int, most: int) -> int:
    """Returns the largest divisor of `whole` up to `most`, at least 1."""
    return next(n for n in range(min(whole, max(most, 1)), 0, -1) if whole % n == 0)
