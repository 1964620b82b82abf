"""What the converter reads from: named tensors on disk, one at a time."""

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np


class TensorInfo(NamedTuple):
    """A tensor's header.

    Attributes:
      shape: as on disk.
      dtype: as the file names it, such as "BF16"; see `FLOATS`.
    """

    shape: tuple[int, ...]
    dtype: str


FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that weights may have; all are read as float32."""


@runtime_checkable
class TensorSource(Protocol):
    """A checkpoint on disk."""

    @property
    def where(self) -> str:
        """What to call it in messages."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Everything that it holds."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor as float32; nothing of it is kept."""
        ...


_ALIGNED = 64
"""Bytes: jax keeps a CPU array that lies on such a border, and copies others."""


def empty_for_jax(shape: tuple[int, ...]) -> np.ndarray:
    """Makes a float32 array that a CPU device can keep without a copy."""
    size = 4 * math.prod(shape)
    room = np.empty(size + _ALIGNED, np.uint8)
    start = -room.ctypes.data % _ALIGNED
    return room[start : start + size].view(np.float32).reshape(shape)


def count_not_finite(array: np.ndarray) -> int:
    """Counts NaN and infinite numbers, some at a time."""
    flat, step = array.reshape(-1), 1 << 20
    parts = (flat[start : start + step] for start in range(0, flat.size, step))
    return sum(int(part.size - np.count_nonzero(np.isfinite(part))) for part in parts)
