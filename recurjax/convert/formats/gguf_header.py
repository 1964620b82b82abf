"""The header of a GGUF file: its fields, and the place of each tensor.

Read value by value: the package `gguf` keeps arrays for each token of a vocabulary,
hundreds of MiB. Source: the format's description in ggml's docs/gguf.md, versions 2
and 3, little-endian.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_SCALARS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
_TEXT, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MOST_AXES = 4


class GgufTensor(NamedTuple):
    """The place of a tensor.

    Attributes:
      name: as llama.cpp calls it.
      shape: the outermost axis first.
      kind: ggml's number of how its values are stored.
      offset: bytes from the beginning of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufHeader(NamedTuple):
    """The header of a GGUF file: everything before the data."""

    fields: dict[str, Any]
    tensors: list[GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Reads a file's header.

    Raises:
      ValueError: it is not a GGUF file, of another version, or damaged.
      OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        values = _Values(stream, size=path.stat().st_size)
        if values.take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = values.scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, not 2 or 3")
        tensor_count, field_count = values.scalar("Q"), values.scalar("Q")
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            key = values.text()
            if key in fields:
                raise ValueError(f"it has the field {key} twice")
            fields[key] = values.value(values.scalar("I"))
        tensors = [_tensor(values) for _ in range(tensor_count)]
        start = values.position
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ValueError("it has a tensor twice")
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    # Offsets count from the first aligned byte after the header.
    start = -(-start // alignment) * alignment
    return GgufHeader(fields, [t._replace(offset=start + t.offset) for t in tensors])


def _tensor(values: "_Values") -> GgufTensor:
    name, axes = values.text(), values.scalar("I")
    if not 1 <= axes <= _MOST_AXES:
        raise ValueError(f"the tensor {name} has {axes} axes")
    # The file names the fastest axis first.
    shape = tuple(values.scalar("Q") for _ in range(axes))[::-1]
    return GgufTensor(name, shape, values.scalar("I"), values.scalar("Q"))


class _Values:
    """Values one after another; never more bytes than the file still has."""

    def __init__(self, stream: BinaryIO, *, size: int):
        self._stream = stream
        self._size = size
        self.position = 0

    def take(self, count: int) -> bytes:
        self.need(count)
        self.position += count
        return self._stream.read(count)

    def need(self, count: int) -> None:
        if count > self._size - self.position:
            raise ValueError("it ends inside its header")

    def scalar(self, letter: str) -> Any:
        [value] = struct.unpack(f"<{letter}", self.take(struct.calcsize(letter)))
        return value

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a field has the unknown type {kind}")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            # Numbers by one call: a vocabulary has a hundred thousand of them.
            letter = _SCALARS[inner]
            data = self.take(count * struct.calcsize(letter))
            return list(struct.unpack(f"<{count}{letter}", data))
        self.need(8 * count)  # each text or array has a length, at the least
        return [self.value(inner) for _ in range(count)]
