"""Ranges of config fields: declared in their annotations, checked by one function.

    class Retry(RangeChecks):
        attempts: PositiveInt
        wait: Annotated[float, Range(above=0, most=60)] = 1.0

`--help` shows the ranges, and a value outside one is a sentence:
`Retry.attempts: must be >= 1, got 0`.
"""

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from recurjax.errors import UserError

LARGEST_SIZE = 2**31 - 1
"""Of a size, a count or a token id: what XLA's and numpy's int32 holds."""

LARGEST_BATCH = 2**28
"""Tokens of one batch over all devices: its ids, targets and segments fill 3 GB."""

_LARGEST_FLOAT = 3.4e38


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The numbers with least <= x <= most and above < x < below.

    A field's annotation carries it: Annotated[int, Range(least=1)]. In an optional
    field or a tuple it holds for the numbers that are there.
    """

    least: float | int = -math.inf
    most: float | int = math.inf
    above: float | int = -math.inf
    below: float | int = math.inf

    def __contains__(self, x: float | int) -> bool:
        # NaN compares false with everything, and infinity is not below itself.
        return self.least <= x <= self.most and self.above < x < self.below

    def __str__(self) -> str:
        bounds = [
            f">= {_shown(self.least)}" if self.least > -math.inf else "",
            f"> {_shown(self.above)}" if self.above > -math.inf else "",
            f"<= {_shown(self.most)}" if self.most < math.inf else "",
            f"< {_shown(self.below)}" if self.below < math.inf else "",
        ]
        return " and ".join(bound for bound in bounds if bound) or "finite"


PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
Fraction = Annotated[float, Range(least=0, most=1)]
PositiveFraction = Annotated[float, Range(above=0, most=1)]
DecayRate = Annotated[float, Range(least=0, below=1)]
"""Of a running mean."""

Seed = Annotated[int, Range(least=0, below=2**32)]
"""Of a random number generator."""


class RangeChecks:
    """A config dataclass whose numbers are checked when it is built.

    One that checks relations between fields as well has a `__post_init__` of its own,
    which calls `check_ranges` first.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        check_ranges(self)


def check_ranges(config: Any) -> None:
    """Checks that all numbers of a config are in range and can be computed with.

    Floats are finite, also as float32. Integers are sizes, counts or ids below 2^31,
    unless their range ends higher. Tuples are looked into, other configs check
    themselves, and None is not a number.

    Raises:
      UserError: naming the class, the first field outside, its range and its value.
    """
    declared = field_ranges(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        for number in _numbers(value):
            if accepted := _refused(number, declared.get(field.name, Range())):
                kind = type(config).__name__
                raise UserError(f"{kind}.{field.name}: must be {accepted}, got {value}")


@cache
def field_ranges(kind: type) -> dict[str, Range]:
    """Returns the ranges that a dataclass declares, by the fields' names."""
    hints = get_type_hints(kind, include_extras=True)
    ranges = {field.name: range_of(hints[field.name]) for field in fields(kind)}
    return {name: declared for name, declared in ranges.items() if declared is not None}


def range_of(hint: Any) -> Range | None:
    """Finds the range that an annotation carries, also inside unions and tuples."""
    for item in getattr(hint, "__metadata__", ()):
        if isinstance(item, Range):
            return item
    inner = (range_of(part) for part in get_args(hint))
    return next((declared for declared in inner if declared is not None), None)


def _refused(number: float | int, declared: Range) -> str | None:
    """Returns what a number must be that is not, or None."""
    if isinstance(number, float):
        if not math.isfinite(number) or abs(number) > _LARGEST_FLOAT:
            return "finite and at most 3.4e38 in size"
    elif number > LARGEST_SIZE and min(declared.most, declared.below) == math.inf:
        return "below 2^31"
    elif number < -LARGEST_SIZE and max(declared.least, declared.above) == -math.inf:
        return "above -2^31"
    return None if number in declared else str(declared)


def _shown(bound: float | int) -> str:
    """Writes a bound; large powers of two as such."""
    for power, words in ((bound, ""), (bound + 1, " - 1")):
        if power >= 1 << 20 and power == int(power) and int(power).bit_count() == 1:
            return f"2^{int(power).bit_length() - 1}{words}"
    return f"{bound:g}"


def _numbers(value: Any) -> list[int | float]:
    # Booleans are integers for Python and pass as 0 and 1.
    if isinstance(value, tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float) else []
