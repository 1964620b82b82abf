"""What the converter reads from: named tensors on disk, one at a time."""

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


def count_not_finite(array: np.ndarray) -> int:
    """Counts NaN and infinite numbers."""
    return int(array.size - np.count_nonzero(np.isfinite(array)))
