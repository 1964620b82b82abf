"""Declares the bytes that a kernel moves, where its operands' shapes do not show them.

A compiled program names complete arrays. A kernel that reads one slot of a tile in a
loop would seem to move the tile each time; so its launch carries the bytes in its name.
"""

import re
from contextlib import AbstractContextManager

import jax

_SCOPE = re.compile(r"\bmoves_(\d+)_bytes\b")


def moving(count: int) -> AbstractContextManager:
    """Marks the launch inside as one that moves `count` bytes."""
    return jax.named_scope(f"moves_{count}_bytes")


def told_of(attributes: str) -> int | None:
    """Returns the bytes that a compiled launch tells of itself, or None."""
    matches = _SCOPE.findall(attributes)
    return int(matches[-1]) if matches else None
