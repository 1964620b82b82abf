"""The endless shuffle: a different permutation of the rows in each epoch.

Any place of the order is computed without the places before it, so that a run continues
anywhere and each process reads its own rows alone.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int32

LARGEST_TABLE = 1 << 22
"""Rows whose permutation is drawn as a table: at most 16 MB, in a second an epoch.

Grain's cipher needs no table and takes 5 us per row, where a table takes 0.3.
"""


class EndlessOrder:
    """A permutation of range(count) for each epoch, one after the other.

    Called with a place k >= 0 it returns the number that comes k-th. Threads may share
    it.
    """

    def __init__(self, count: int, seed: int):
        """Computes nothing yet.

        Args:
          count: n, of the numbers that are shuffled; at least 1.
          seed: in [0, 2**32).
        """
        self._count, self._seed = count, seed
        # Threads that read ahead cross the border of two epochs.
        self._table = lru_cache(maxsize=2)(self._permutation)
        # The seed of grain.MapDataset.range(count).seed(seed).shuffle().
        sequence = np.random.SeedSequence([seed, 1])
        self._cipher_seed = int(sequence.generate_state(1, np.uint32)[0])

    def __call__(self, place: int) -> int:
        epoch, at = divmod(place, self._count)
        if self._count <= LARGEST_TABLE:
            return self._table(epoch).item(at)
        return self._enciphered(epoch, at)

    def _permutation(self, epoch: int) -> Int32[np.ndarray, " N"]:
        # numpy promises that PCG64's raw numbers never change. `Generator.permutation`
        # may, and a run that resumes with another numpy would read other rows.
        raw = np.random.PCG64([self._seed, epoch]).random_raw(self._count)
        return np.argsort(raw, kind="stable").astype(np.int32)

    def _enciphered(self, epoch: int, at: int) -> int:
        from grain.experimental import index_shuffle

        last = self._count - 1
        # Of 4^k + 1 numbers grain 0.2.18 gives one twice and another never. Those of
        # one more are right, and the cipher is applied again where it yields that one.
        if last.bit_count() == 1 and last.bit_length() % 2:
            last += 1
        key = (self._cipher_seed + epoch) % 2**32
        number = index_shuffle(at, max_index=last, seed=key, rounds=4)
        while number >= self._count:
            number = index_shuffle(number, max_index=last, seed=key, rounds=4)
        return number


def order_identity(*counts: int) -> dict[str, Any]:
    """Returns what a place in shuffled rows depends on in addition to data and seed.

    States of older versions lack the entry: they ordered small sets by the cipher too.

    Args:
      counts: number of items in each order that rows are drawn by.
    """
    by_table = any(count <= LARGEST_TABLE for count in counts)
    return {"shuffle": "permutation"} if by_table else {}
