"""The converter's source: named tensors on disk, read one at a time."""

import math
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike

from recurjax.model import WeightDtype


class TensorInfo(NamedTuple):
    """A tensor's header.

    Attributes:
      shape: as on disk.
      dtype: as the file names it, such as "BF16"; see `FLOATS`.
    """

    shape: tuple[int, ...]
    dtype: str


FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that weights may have."""


@runtime_checkable
class TensorSource(Protocol):
    """A checkpoint on disk."""

    @property
    def where(self) -> str:
        """The source's name in messages."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Everything that it holds."""
        ...

    def read(self, name: str, dtype: DTypeLike = np.float32) -> np.ndarray:
        """Reads one tensor in a dtype; nothing of it is kept."""
        ...


Part = Literal["values", "scales", "offsets"]
"""Parts of a quantized weight: see `QuantizedWeight`."""


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """A checkpoint whose matrices may be integers with scales of groups."""

    def weight_dtype(self, tables: Collection[str]) -> WeightDtype:
        """Returns the dtype that holds its matrices as they are.

        Args:
          tables: names of the embedding and of the head.

        Raises:
          UserError: there is none for the layers' matrices.
        """
        ...

    def read(
        self, name: str, dtype: DTypeLike = np.float32, *, part: Part | None = None
    ) -> np.ndarray:
        """Reads a tensor, or a part of it: a group's scale is there for each input."""
        ...


class RenamedTensors:
    """Tensors under other names; see `TensorSource`."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]):
        """Takes the new names.

        Args:
          source: the tensors.
          names: for each new name the one in `source`; what has none is left out.
        """
        self.where = source.where
        self.tensors: dict[str, TensorInfo] = {
            new: source.tensors[old] for new, old in names.items()
        }
        self._source, self._names = source, names

    def read(self, name: str, dtype: DTypeLike = np.float32) -> np.ndarray:
        return self._source.read(self._names[name], dtype)


_ALIGNED = 64
"""Bytes: jax keeps a CPU array with this alignment, and copies others."""


def empty_for_jax(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> np.ndarray:
    """Creates an array that a CPU device can keep without a copy."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    room = np.empty(size + _ALIGNED, np.uint8)
    start = -room.ctypes.data % _ALIGNED
    return room[start : start + size].view(dtype).reshape(shape)


def count_not_finite(array: np.ndarray) -> int:
    """Counts NaN and infinite numbers, some at a time."""
    flat, step = array.reshape(-1), 1 << 20
    parts = (flat[start : start + step] for start in range(0, flat.size, step))
    return sum(int(part.size - np.count_nonzero(np.isfinite(part))) for part in parts)
