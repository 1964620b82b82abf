"""The tensor names of our own PyTorch modules, of any variant."""

import re

from recurjax.convert.pieces import Piece, PieceTable, is_stacked
from recurjax.model import ModelConfig
from recurjax.parameters import torch_word

_BLOCK = re.compile(r"^stack\.blocks\.(?:(\d+)\.)?")


def torch_pieces(config: ModelConfig) -> list[Piece]:
    """Returns the table of a model: `layers.3.attention.q.weight` and so on."""
    table = PieceTable(config)
    # Places of the pattern, which the names of our blocks have.
    places = {match[1] for name in table.shapes if (match := _BLOCK.match(name))}
    period = len(places)
    for name in table.shapes:
        match = _BLOCK.match(name)
        if match is None:
            # The table of learned positions belongs to the decoder, as embedding does.
            short = name.removeprefix("stack.position.")
            # Unstacked layers of unequal shapes are `stack.layers.3` here already.
            _add(table, re.sub(r"^stack\.(layers\.)?", "layers.", short), name, None)
            continue
        rest, place = name[match.end() :], int(match[1] or 0)
        for index in range(table.shapes[name][0]):
            # Our layer is its place in the pattern and its repeat.
            layer = index * period + place
            _add(table, f"layers.{layer}.{rest}", name, index)
    return table.finished()


def _add(table: PieceTable, named: str, parameter: str, layer: int | None) -> None:
    assert is_stacked(parameter) == (layer is not None)
    parents, dot, _ = named.rpartition(".")
    table.same(parents + dot + torch_word(parameter), parameter, layer)
