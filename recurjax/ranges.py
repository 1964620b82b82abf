"""Range checks of config fields, one sentence each; NaN lies in no range."""

import math
from dataclasses import fields
from typing import Any

from recurjax.errors import UserError


def require_range(
    config: Any,
    *names: str,
    least: float | int = -math.inf,
    most: float | int = math.inf,
    above: float | int = -math.inf,
    below: float | int = math.inf,
) -> None:
    """Checks that fields are finite with least <= x <= most and above < x < below.

    A field that is None is left alone: it switches something off.

    Raises:
      UserError: naming the class, the first field outside and its value.
    """
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        # NaN compares false with everything, and infinity is not below itself.
        inside = least <= value <= most and above < value < below
        if not inside:
            bounds = [
                f">= {least:g}" if least > -math.inf else "",
                f"> {above:g}" if above > -math.inf else "",
                f"<= {most:g}" if most < math.inf else "",
                f"< {below:g}" if below < math.inf else "",
            ]
            wish = " and ".join(bound for bound in bounds if bound) or "finite"
            raise UserError(
                f"{type(config).__name__}: {name} must be {wish}, got {value}"
            )


LARGEST_SIZE = 2**31 - 1
"""Of a size, a count or a token id: what XLA's and numpy's int32 holds."""

LARGEST_BATCH = 2**28
"""Tokens of one batch over all devices: its ids, targets and segments fill 3 GB."""

_LARGEST_FLOAT = 3.4e38
_WIDE = ("seed", "map_seed", "train_bytes")
"""Fields that are no sizes of anything."""


def require_numbers(config: Any) -> None:
    """Checks that all numbers of a config can be computed with; its first check.

    Floats are finite, also as float32; integers are sizes, counts or ids below 2^31.
    Tuples are looked into, other configs check themselves.

    Raises:
      UserError: naming the class, the field and its value.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        wide = field.name in _WIDE
        for number in _numbers(value):
            if isinstance(number, float):
                wish = "finite and at most 3.4e38 in size"
                fits = math.isfinite(number) and abs(number) <= _LARGEST_FLOAT
            else:
                wish = "below 2^63" if wide else "below 2^31"
                fits = abs(number) <= (2**63 - 1 if wide else LARGEST_SIZE)
            if not fits:
                raise UserError(
                    f"{type(config).__name__}: {field.name} must be {wish}, got {value}"
                )


def _numbers(value: Any) -> list[int | float]:
    # Booleans are integers for Python and pass as 0 and 1.
    if isinstance(value, tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float) else []
