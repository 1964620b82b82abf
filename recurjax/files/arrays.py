"""Small arrays from outside: any fault of a file is one error message.

numpy's own reader believes a header: it allocates what the header claims, and some
damaged headers raise errors of Python's parser. Here a file's size decides.
"""

import io
import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recurjax.errors import UserError

LARGEST = 2**30
"""Bytes of an array in a .npz file, which may be compressed a thousandfold."""


class Expected(NamedTuple):
    """The dtype and shape that an array must have.

    Attributes:
      kinds: accepted kinds of dtype in numpy's letters: "iu" for integers, "f" for
        floats.
      shape: None for a size that may be any.
    """

    kinds: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        names = {
            "f": "floating-point numbers",
            "iu": "integers",
            "i": "signed integers",
        }
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{names.get(self.kinds, self.kinds)} of shape [{sizes}]"


def read_array(source: Path | bytes, expected: Expected, what: str) -> np.ndarray:
    """Reads a .npy file.

    Args:
      source: the file, or its bytes.
      expected: what the array must be.
      what: what to call it in messages, with the file's name.

    Raises:
      UserError: it cannot be read, is damaged, or is not as expected.
    """
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
        array = _array(io.BytesIO(data), len(data))
    except _DAMAGED as error:
        raise UserError(f"{what} is not a .npy file of numbers: {error}") from error
    return _checked(array, expected, what)


def read_arrays(
    file: Path, expected: Mapping[str, Expected], what: str
) -> dict[str, np.ndarray]:
    """Reads the named arrays of a .npz file; see `read_array`."""
    arrays = {}
    try:
        with zipfile.ZipFile(file) as archive:
            for name in expected:
                size = min(archive.getinfo(f"{name}.npy").file_size, LARGEST)
                with archive.open(f"{name}.npy") as member:
                    arrays[name] = _array(member, size)
    except (*_DAMAGED, zipfile.BadZipFile, RuntimeError) as error:
        raise UserError(f"{what} is not a .npz file of numbers: {error}") from error
    return {
        name: _checked(array, expected[name], f"{what}, {name}")
        for name, array in arrays.items()
    }


_DAMAGED = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    SyntaxError,
    RecursionError,
    MemoryError,
    OverflowError,
    NotImplementedError,
    EOFError,
    tokenize.TokenError,  # numpy parses headers of Python 2
    zlib.error,
)


def _array(file: Any, size: int) -> np.ndarray:
    """Reads an array from a file of `size` bytes."""
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, by_columns, dtype = read(file)
    if dtype.hasobject or dtype.kind not in "iufb":
        raise ValueError(f"its dtype is {dtype}")
    length = math.prod(shape) * dtype.itemsize
    # A header of 2^30 bytes or an array of 2^60 would be believed otherwise.
    if min(shape, default=0) < 0 or length > size:
        raise ValueError(
            f"its header describes {dtype}{shape} and it has {size:,} bytes"
        )
    data = file.read(length)
    if len(data) != length or file.read(1):
        raise ValueError(f"its bytes do not match its header, {dtype}{shape}")
    flat = np.frombuffer(data, dtype)
    return flat.reshape(shape, order="F" if by_columns else "C")


def _checked(array: np.ndarray, expected: Expected, what: str) -> np.ndarray:
    sizes = expected.shape
    fits = len(array.shape) == len(sizes) and all(
        want in (None, size) for want, size in zip(sizes, array.shape, strict=True)
    )
    if array.dtype.kind not in expected.kinds or not fits:
        raise UserError(
            f"{what} must hold {expected}, got {array.dtype}{list(array.shape)}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise UserError(f"{what} holds NaN or infinities")
    return array
