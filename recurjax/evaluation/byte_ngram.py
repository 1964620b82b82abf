"""An interpolated byte n-gram model: the yardstick that a first model must beat."""

import numpy as np


def ngram_bits_per_byte(train: bytes, test: bytes, *, order: int) -> float:
    """Trains on one text and returns the cross-entropy of another, in bits per byte.

    p_n(b | c) = (count(c b) + kinds(c) p_{n-1}(b | c')) / (count(c) + kinds(c)), where
    c is the context of n bytes, c' the same less its oldest, kinds(c) the number of
    different bytes seen after c, and p_{-1} = 1/256. Source: Witten and Bell 1991,
    method C, interpolated.

    Args:
      order: n, bytes of context, 0 to 7.

    Raises:
      ValueError: an order out of range, or a text shorter than order + 1.
    """
    if not 0 <= order <= 7:
        raise ValueError(f"ngram_bits_per_byte: order must be in 0..7, got {order}")
    if min(len(train), len(test)) <= order:
        raise ValueError(
            f"ngram_bits_per_byte: texts must have more than {order} bytes"
        )
    # p_{-1}, the same for all bytes; each turn mixes in the next longer context.
    probability = np.full(len(test) - order, 1 / 256)
    for n in range(order + 1):
        # A gram is its context and one byte: sorted, those of one context are
        # neighbours, and kinds(c) is how many grams they are.
        grams, gram_counts = np.unique(_grams(train, n + 1), return_counts=True)
        contexts, firsts = np.unique(grams >> np.uint64(8), return_index=True)
        kinds = np.diff(np.append(firsts, len(grams)))
        totals = np.add.reduceat(gram_counts, firsts)
        # Every order predicts the same bytes, those with `order` bytes before them.
        test_grams = _grams(test, n + 1)[order - n :]
        count = _look_up(grams, gram_counts, test_grams)
        total = _look_up(contexts, totals, test_grams >> np.uint64(8))
        kind = _look_up(contexts, kinds, test_grams >> np.uint64(8))
        # An unseen context leaves the shorter one's probability.
        seen = total > 0
        mixed = (count + kind * probability) / np.maximum(total + kind, 1)
        probability = np.where(seen, mixed, probability)
    return float(-np.log2(probability).mean())


def _grams(text: bytes, size: int) -> np.ndarray:
    """Returns each run of `size` bytes as one number, the last byte lowest."""
    data = np.frombuffer(text, np.uint8).astype(np.uint64)
    grams = np.zeros(len(data) - size + 1, np.uint64)
    for offset in range(size):
        grams = (grams << np.uint64(8)) | data[offset : len(grams) + offset]
    return grams


def _look_up(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Returns each query's value, or 0 without a match; keys are sorted."""
    at = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[at] == queries, values[at], 0)
