"""A model's parameters as tensors of a safetensors file."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from recurjax.convert.pieces import Piece
from recurjax.model import Decoder
from recurjax.parameters import to_nested_dict
from recurjax.training.checkpoint.manifest import named


def to_tensors(model: Decoder, pieces: Iterable[Piece]) -> dict[str, np.ndarray]:
    """Returns every tensor of the table, in float32, the numbers unchanged.

    Args:
      model: on one process' devices.
      pieces: what lies where; together they fill each tensor.
    """
    arrays = named(to_nested_dict(model))
    of_tensor: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        # A tensor of theirs may hold several parameters of ours, and is written whole.
        of_tensor[piece.tensor].append(piece)
    tensors = {}
    for name, parts in of_tensor.items():
        # Its numbers are unset: the pieces together write every one of them.
        disk = np.empty(parts[0].shape, np.float32)
        for piece in parts:
            ours = arrays[piece.parameter]
            piece.put(
                disk, np.asarray(ours if piece.layer is None else ours[piece.layer])
            )
        tensors[name] = disk
    return tensors


def write_tensors(model: Decoder, pieces: Iterable[Piece], file: Path) -> None:
    """Writes them; `format` pt is what torch's and transformers' readers ask for."""
    save_file(to_tensors(model, pieces), file, metadata={"format": "pt"})
