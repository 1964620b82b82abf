"""The endless shuffle: another permutation of the rows each epoch, any place at once.

A place in the order must be found without what comes before it: that is what lets a
run continue anywhere and lets each process read its own rows alone. So the permutation
is a cipher of the row's number. A cipher permutes the numbers of so many bits; a
number that leaves the range is enciphered again until it is back in it ("cycle
walking", Black and Rogaway 2002, which permutes any range).

The order is grain's (`MapDataset.range(n).seed(s).shuffle().repeat()`), to the bit,
with one exception told at `_bits`. Grain enciphers row by row. Its cipher has at least
16 bits, and a small text's row leaves the range some 2^16 / n times: 0.15 ms for each
of 900 rows, 1.3 ms for each of 100, which was most of the time of a mixture of small
texts. Here a whole epoch of a small set, or a stretch of a large one, is worked out at
once.
"""

from collections import OrderedDict
from threading import Lock

import numpy as np
from jaxtyping import Int64, UInt32

_ROUNDS = 4
_LEAST_BITS = 16
_STRETCH = 4096
"""Places worked out at once in a set too large for a table of its cipher."""

_DOUBLINGS = 5
"""Of steps within the table, before only those who still walk are looked at: a doubling
costs 0.15 ms, and the longest walk of 900 rows has some 500 steps."""

_KEPT = 4
"""Stretches remembered: threads that read ahead may stand in neighbouring ones."""


class EndlessOrder:
    """A permutation of range(count) for each epoch, one after the other.

    Called with a place k >= 0 it returns the number that comes k-th. Threads may share
    it.
    """

    def __init__(self, count: int, seed: int):
        """Works out nothing yet.

        Args:
          count: n, of the numbers that are shuffled; at least 1.
          seed: in [0, 2**32).
        """
        self._count = count
        # Grain's seed of a shuffle one transformation behind the seeded data set.
        sequence = np.random.SeedSequence([seed, 1])
        self._seed = int(sequence.generate_state(1, np.uint32)[0])
        self._bits = _bits(count)
        # A small set's epoch costs the whole table of its cipher, whatever is asked.
        self._stretch = count if self._bits == _LEAST_BITS else _STRETCH
        self._made: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        self._making = Lock()

    def __call__(self, place: int) -> int:
        [number] = self.following(place, 1)
        return number

    def following(self, place: int, many: int) -> list[int]:
        """Returns the numbers at `many` places from `place` on."""
        found: list[int] = []
        # A stretch ends where an epoch does; a small set's many epochs are as many.
        while (left := many - len(found)) > 0:
            epoch, at = divmod(place + len(found), self._count)
            begin = at % self._stretch
            made = self._made.get((epoch, at - begin))
            if made is None:
                made = self._make(epoch, at - begin)
            found += made[begin : begin + left]
        return found

    def _make(self, epoch: int, first: int) -> list[int]:
        with self._making:
            # Another thread may have been here meanwhile.
            made = self._made.get((epoch, first))
            if made is None:
                made = self._made[epoch, first] = self._shuffled(epoch, first)
                if len(self._made) > _KEPT:
                    self._made.popitem(last=False)
        return made

    def _shuffled(self, epoch: int, first: int) -> list[int]:
        keys = _round_keys((self._seed + epoch) % 2**32)
        last = min(first + self._stretch, self._count)
        places = np.arange(first, last, dtype=np.int64)
        walk = _walked_by_table if self._bits == _LEAST_BITS else _walked
        return walk(places, self._count, self._bits, keys).tolist()


def _bits(count: int) -> int:
    """Returns the bits of the cipher's numbers: even, and enough for count - 1.

    Departs from grain, which has two bits too few where count - 1 is a power of four
    from 2^16 on: it then gives one number twice and another never.
    """
    bits = (count - 1).bit_length()
    return max(bits + bits % 2, _LEAST_BITS)


def _walked_by_table(
    places: Int64[np.ndarray, " N"],
    count: int,
    bits: int,
    keys: UInt32[np.ndarray, " R"],
) -> Int64[np.ndarray, " N"]:
    """Enciphers each place until it is below count, for all numbers of few bits."""
    assert bits == _LEAST_BITS
    enciphered = _enciphered_bytes(keys)
    # following[v]: v if it is in the range, else what v is enciphered to. Following it
    # by itself doubles its steps, which stop in the range and so never go too far.
    following = enciphered.copy()
    following[:count] = np.arange(count)
    for _ in range(_DOUBLINGS):
        following = following.take(following, mode="clip")
    found = enciphered[places]
    # A walk comes back, for a cipher is a permutation: it returns to where it began.
    while len(outside := np.flatnonzero(found >= count)):
        found[outside] = following[found[outside]]
    return found


def _walked(
    places: Int64[np.ndarray, " N"],
    count: int,
    bits: int,
    keys: UInt32[np.ndarray, " R"],
) -> Int64[np.ndarray, " N"]:
    """Enciphers each place until it is below count; four times in the mean at most."""
    found = _encipher(places, bits, keys)
    while len(outside := np.flatnonzero(found >= count)):
        found[outside] = _encipher(found[outside], bits, keys)
    return found


def _encipher(
    values: Int64[np.ndarray, " N"], bits: int, keys: UInt32[np.ndarray, " R"]
) -> Int64[np.ndarray, " N"]:
    """Applies rounds of the Simon cipher to numbers of so many bits.

    A round is (left, right) -> (right ^ f(left) ^ key, left) on the halves of a number,
    f(x) = (x <<< 1 & x <<< 8) ^ (x <<< 2). Source: Beaulieu and others 2013, "The Simon
    and Speck families of lightweight block ciphers", figure 3.1.
    """
    word = bits // 2
    # As narrow as the halves allow: most of the time goes through memory.
    kind = np.uint8 if word == 8 else np.uint16 if word <= 16 else np.uint32
    mask = kind((1 << word) - 1)
    left, right = (values & int(mask)).astype(kind), (values >> word).astype(kind)
    for key in keys:
        mixed = right ^ _mixed(left, word) ^ kind(int(key) & int(mask))
        left, right = mixed, left
    # The halves changed sides once for each of an even number of rounds.
    return right.astype(np.int64) << word | left


def _enciphered_bytes(keys: UInt32[np.ndarray, " R"]) -> Int64[np.ndarray, " N"]:
    """Returns `_encipher` of all N = 2^16 numbers of two bytes.

    Of a byte f is looked up, and a round's key is already in what is found. Of the
    first round all there is of `right` and f(left) are their 256 values.
    """
    byte = np.arange(256, dtype=np.uint8)
    looked_up = [_mixed(byte, 8) ^ np.uint8(int(key) & 255) for key in keys]
    # [right, left]: in the order of the numbers, of which left is the lower byte.
    left, right = byte[:, None] ^ looked_up[0], byte
    for known in looked_up[1:]:
        mixed = known.take(left, mode="clip")
        mixed ^= right
        left, right = mixed, left
    both = right.astype(np.int64)
    both <<= 8
    both |= left
    return both.ravel()


def _mixed(x: np.ndarray, word: int) -> np.ndarray:
    """Returns the cipher's f of words of so many bits."""
    kind = x.dtype.type
    mask = kind((1 << word) - 1)

    def rotated(by: int) -> np.ndarray:
        return (x << kind(by) | x >> kind(word - by)) & mask

    # Rotating a word of eight bits by eight changes nothing.
    by_eight = x if word == 8 else rotated(8)
    return (rotated(1) & by_eight) ^ rotated(2)


def _round_keys(seed: int) -> UInt32[np.ndarray, " R"]:
    """Spreads a seed over the rounds' keys as C++'s `std::seed_seq` does.

    Source: ISO C++ 2011, [rand.util.seedseq], for one seed and `_ROUNDS` words.
    """
    n, word = _ROUNDS, 2**32
    keys = [0x8B8B8B8B] * n
    offset = (n - 1) // 2  # the standard's t, which for fewer than 7 words is this
    p = (n - offset) // 2
    q = p + offset

    def spread(x: int) -> int:
        return x ^ x >> 27

    for k in range(n):
        this, there, before = k, (k + p) % n, (k - 1) % n
        one = 1664525 * spread(keys[this] ^ keys[there] ^ keys[before]) % word
        # The seeds come in at the first words: their count, then each of them.
        told = 1 if k == 0 else k + seed if k == 1 else k
        two = (one + told) % word
        keys[there] = (keys[there] + one) % word
        keys[(k + q) % n] = (keys[(k + q) % n] + two) % word
        keys[this] = two
    for k in range(n):
        this, there, before = k, (k + p) % n, (k - 1) % n
        total = (keys[this] + keys[there] + keys[before]) % word
        three = 1566083941 * spread(total) % word
        four = (three - k) % word
        keys[there] ^= three
        keys[(k + q) % n] ^= four
        keys[this] = four
    return np.array(keys, np.uint32)
