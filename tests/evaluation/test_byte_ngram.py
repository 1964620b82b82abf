import math
from collections import Counter

import pytest

from recurjax.data.corpora import embedded_text
from recurjax.evaluation.byte_ngram import ngram_bits_per_byte

TEXT = embedded_text()[:3000].encode()
TRAIN, TEST = TEXT[:2500], TEXT[2500:]


def brute_force(train, test, order):
    """Witten-Bell by its definition, one byte and one order after another."""

    def probability(context, byte, n):
        if n < 0:
            return 1 / 256
        context = context[len(context) - n :]
        after = Counter(
            train[i + n] for i in range(len(train) - n) if train[i : i + n] == context
        )
        lower = probability(context, byte, n - 1)
        if not after:
            return lower
        kinds, total = len(after), sum(after.values())
        return (after[byte] + kinds * lower) / (total + kinds)

    bits = [
        -math.log2(probability(test[t - order : t], test[t], order))
        for t in range(order, len(test))
    ]
    return sum(bits) / len(bits)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_it_is_the_recursive_formula(order):
    test = TEST[:120]
    got = ngram_bits_per_byte(TRAIN, test, order=order)
    assert got == pytest.approx(brute_force(TRAIN, test, order), rel=1e-12)


def test_the_longest_context_uses_all_of_a_word_of_eight_bytes():
    train, test = b"\xff\xfe" * 20 + b"abcdefghij" * 3, b"\xff\xfe" * 6 + b"abcdefghk"
    got = ngram_bits_per_byte(train, test, order=7)
    assert got == pytest.approx(brute_force(train, test, 7), rel=1e-12)


def test_a_longer_context_predicts_text_better():
    bits = [ngram_bits_per_byte(TRAIN, TEST, order=n) for n in (0, 1, 2)]
    assert 8 > bits[0] > bits[1] > bits[2]


@pytest.mark.parametrize("order, message", [(8, "in 0..7, got 8"), (2, "more than 2")])
def test_what_it_cannot_do_is_said(order, message):
    with pytest.raises(ValueError, match=message):
        ngram_bits_per_byte(b"abc", b"ab", order=order)
