"""The part of a mixture that each row comes from: exact shares, random access."""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np
from jaxtyping import Int32, Int64

from recurjax.errors import UserError

LONGEST = 100_000
"""Rows after which shares repeat, at most: the table of parts is computed at once."""


class Shares:
    """The order in which parts give rows, with weights that may change at some rows.

    Between two changes, after n rows a part of weight w has given w n rows to within
    less than one. Grain's mix holds no such bound: it rounds weights to hundredths of
    the least, so that shares drift, and is 7 rows off with ten parts of weights 1 and
    30; its weights neither change nor are 0.

    Source: Tijdeman 1980, "The chairman assignment problem": of the parts that may give
    a row, the one whose row is due first gives it.
    """

    def __init__(self, changes: Sequence[tuple[int, Sequence[float]]]):
        """Plans all rows.

        Args:
          changes: (first row, weights from there on), ascending; the first at row 0.

        Raises:
          UserError: weights that are not multiples of a LONGEST-th of their sum.
        """
        self._firsts = [row for row, _ in changes]
        self._cycles = [_Cycle(weights) for _, weights in changes]
        # Rows that each part has given where a cycle begins.
        totals = [np.zeros(len(changes[0][1]), np.int64)]
        for at in range(1, len(changes)):
            rows = self._firsts[at] - self._firsts[at - 1]
            totals.append(totals[-1] + self._cycles[at - 1].counts(rows))
        self._totals: list[list[int]] = [counts.tolist() for counts in totals]

    def rows(self, first: int, stop: int) -> dict[int, tuple[int, list[int]]]:
        """Returns, by part, where rows first .. stop-1 come from.

        Returns:
          For each part that gives any: the number of the first of them among its own
          rows, which the others follow, and which rows they are, less `first`.
        """
        result: dict[int, tuple[int, list[int]]] = {}
        begin = first
        while begin < stop:
            at = bisect_right(self._firsts, begin) - 1
            cycle, end = self._cycles[at], stop
            if at + 1 < len(self._firsts):
                end = min(end, self._firsts[at + 1])
            cycles, place = divmod(begin - self._firsts[at], cycle.length)
            end = min(end, begin + cycle.length - place)
            for row in range(begin - first, end - first):
                part = cycle.parts[place]
                if part in result:
                    result[part][1].append(row)
                else:
                    before = cycles * cycle.per_cycle[part] + cycle.earlier[place]
                    result[part] = self._totals[at][part] + before, [row]
                place += 1
            begin = end
        return result


def whole_numbers(weights: Sequence[float]) -> list[int]:
    """Returns the smallest integers in the same proportion.

    A weight is what its decimal digits say: 0.1 is a tenth.

    Raises:
      UserError: they sum to more than LONGEST.
    """
    # By the decimal digits: 0.1 as a float is not a tenth.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    parts = [int(weight * scale) for weight in exact]
    common = int(np.gcd.reduce(parts))
    parts = [part // common for part in parts]
    if sum(parts) > LONGEST:
        raise UserError(
            f"the weights {', '.join(map(str, weights))} are not multiples of "
            f"a {LONGEST:,}th of their sum: round them, for example to 0.25 or "
            "0.001"
        )
    return parts


class _Cycle:
    """Shares that repeat after as many rows as their weights' denominator.

    Attributes:
      length: length of the cycle, in rows.
      parts: which part gives each of its rows.
      earlier: for each of its rows, how many its part has given before.
      per_cycle: how many each part gives in a cycle.
    """

    # Lists, which are faster than arrays at being looked up row by row.

    def __init__(self, weights: Sequence[float]):
        parts = whole_numbers(weights)
        # One cycle is worked out; every later one repeats it.
        order = _in_order(parts)
        self.length = len(order)
        hit = order[None, :] == np.arange(len(parts))[:, None]
        # [P, length + 1]: rows of each part before each row.
        self._before = np.pad(np.cumsum(hit, axis=1, dtype=np.int64), ((0, 0), (1, 0)))
        self.parts: list[int] = order.tolist()
        self.earlier: list[int] = self._before[order, np.arange(len(order))].tolist()
        self.per_cycle: list[int] = self._before[:, -1].tolist()

    def counts(self, rows: int) -> Int64[np.ndarray, " P"]:
        """Counts the rows of each part among the first `rows` rows."""
        cycles, at = divmod(rows, self.length)
        return cycles * self._before[:, -1] + self._before[:, at]


def _in_order(parts: list[int]) -> Int32[np.ndarray, " N"]:
    """Returns which part gives each row of a cycle of sum(parts) rows.

    With M = sum(parts) and P parts, all times M: part p's claim before row n is
    s = parts[p] (n + 1) - M given[p]. It may give the row once s reaches M / (2P - 2),
    and must before s reaches M (1 - 1 / (2P - 2)); the nearest such end goes first.
    """
    length, present = sum(parts), [p for p, size in enumerate(parts) if size]
    if len(present) == 1:
        return np.full(length, present[0], np.int32)
    gap = 2 * len(present) - 2
    counts = dict.fromkeys(present, 0)
    order = np.zeros(length, np.int32)
    for n in range(length):
        best: tuple[Fraction | float, int] | None = None
        for p in present:
            claim = parts[p] * (n + 1) - length * counts[p]
            # The claim has not grown to where a row of this part is allowed.
            if gap * claim < length:
                continue
            # Compared as floats: two ends closer than their rounding are a tie, and
            # which of two tied parts goes first does not matter.
            end = ((gap - 1) * length - gap * claim) / parts[p]
            if best is None or end < best[0]:
                best = (end, p)
        assert best is not None  # claims sum to M, so one reaches M / P
        order[n] = best[1]
        counts[best[1]] += 1
    return order
