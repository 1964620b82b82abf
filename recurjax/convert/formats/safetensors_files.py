"""Safetensors on disk: one file, or shards with an index; read tensor by tensor."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from recurjax.convert.formats.tensors import TensorInfo, empty_for_jax
from recurjax.errors import UserError, first_few
from recurjax.files.atomic import inside
from recurjax.files.json_files import parse_json, read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}


class _Place(NamedTuple):
    file: Path
    offset: int


class SafetensorsFiles:
    """A checkpoint of one or more safetensors files; see `TensorSource`.

    The safetensors package checks each file's header against its length. Tensors are
    then read from their offsets, without mapping the file, so that memory holds one.
    """

    def __init__(self, files: Sequence[Path], *, where: str):
        """Reads the headers.

        Raises:
          UserError: a file is incomplete, its header is wrong, or two hold the same
            name.
        """
        self.where = where
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        for file in files:
            # Shards may not hold the same tensor twice: which one would count?
            for name, info, offset in _header(file):
                if name in self.tensors:
                    raise UserError(
                        f"{where} holds the tensor {name} twice: use an undamaged "
                        "checkpoint"
                    )
                self.tensors[name] = info
                self._places[name] = _Place(file, offset)

    def read(self, name: str, dtype: DTypeLike = np.float32) -> np.ndarray:
        shape, stored = self.tensors[name]
        file, offset = self._places[name]
        # A tensor of this dtype is read into its final place, others are cast after.
        raw = empty_for_jax(shape, _DTYPES[stored])
        with file.open("rb") as stream:
            stream.seek(offset)
            if stream.readinto(raw.reshape(-1).view(np.uint8).data) != raw.nbytes:
                raise UserError(f"{file} ends inside the tensor {name}")
        if raw.dtype == dtype:
            return raw
        values = empty_for_jax(shape, dtype)
        np.copyto(values, raw, casting="unsafe")
        return values


def open_directory(directory: Path) -> SafetensorsFiles:
    """Opens a Hugging Face directory's weights.

    Raises:
      UserError: it has none in safetensors, or shards are missing or damaged.
    """
    if (directory / INDEX).is_file():
        return _open_shards(directory)
    if (directory / SINGLE).is_file():
        return SafetensorsFiles([directory / SINGLE], where=str(directory))
    # Named, so that the reader knows that the weights are there and why they are not
    # read.
    others = sorted(p.name for p in directory.glob("pytorch_model*.bin"))
    hint = (
        f"; {others[0]} is a pickle, which is never read: convert it to safetensors"
        if others
        else ""
    )
    raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}{hint}")


def _open_shards(directory: Path) -> SafetensorsFiles:
    file = directory / INDEX
    homes = read_json_object(file, "the index of shards").get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise UserError(f"{file} is not an index of shards: it has no weight_map")
    # Names from the index must not lead out of the folder.
    places = [inside(directory, name, source=file) for name in homes.values()]
    paths = sorted(set(places))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        names = first_few(missing, separator=", ")
        raise UserError(f"{directory} lacks the shards {names}")
    source = SafetensorsFiles(paths, where=str(directory))
    if differing := sorted(set(homes) ^ set(source.tensors)):
        raise UserError(
            f"{file} and its shards do not name the same tensors: "
            f"{first_few(differing, separator=', ')}"
        )
    return source


def _header(file: Path) -> list[tuple[str, TensorInfo, int]]:
    try:
        with safe_open(file, framework="numpy"):  # checks the header, reads no tensor
            pass
    except SafetensorError as error:
        raise UserError(
            f"{file} is not a complete safetensors file: {_reason(error, file)}"
        ) from error
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        entries = parse_json(stream.read(size), f"the header of {file}")
    entries.pop("__metadata__", None)
    return [
        (
            name,
            TensorInfo(tuple(entry["shape"]), entry["dtype"]),
            8 + size + entry["data_offsets"][0],
        )
        for name, entry in entries.items()
    ]


def _reason(error: SafetensorError, file: Path) -> str:
    text = str(error)
    if "not fully covered" in text or "too small" in text:
        return f"its {file.stat().st_size} bytes do not match its header (cut off?)"
    return text.removeprefix("Error while deserializing header: ")
