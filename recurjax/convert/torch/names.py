"""The tensor names of our own PyTorch modules, of any variant."""

import re

from recurjax.convert.pieces import Layer, Piece, PieceTable, indices, layers_of
from recurjax.model import ModelConfig
from recurjax.parameters import torch_word
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

_BLOCK = re.compile(r"^stack\.(?:blocks|(adapters))\.(?:(\d+)\.)?")


def torch_pieces(config: ModelConfig) -> list[Piece]:
    """Returns the table of a model: `layers.3.attention.q.weight` and so on."""
    table = PieceTable(config)
    # Places of the pattern, which the names of our blocks have.
    places = {match[2] for name in table.shapes if (match := _BLOCK.match(name))}
    # A block that loops has what its layers share, and what each run of one owns.
    looped = isinstance(config.stack, RelaxedRecursiveTransformerConfig)
    period = len(places)
    for name in table.shapes:
        match = _BLOCK.match(name)
        if match is None:
            # The table of learned positions belongs to the decoder, as embedding does.
            short = name.removeprefix("stack.position.")
            # Unstacked layers of unequal shapes are `stack.layers.3` here already.
            _add(table, re.sub(r"^stack\.(layers\.)?", "layers.", short), name, None)
            continue
        rest, place = name[match.end() :], int(match[2] or 0)
        if match[1]:
            rest = f"adapters.{rest}"
        for layer in layers_of(name, table.shapes[name]):
            *use, index = indices(layer)
            # Our layer is its place in the pattern and its repeat.
            number = index * period + place
            if isinstance(config.stack, TransformerConfig):
                number = config.stack.stacked[place][index]
            shared = "blocks." if looped else ""
            of = f"uses.{use[0]}.{number}" if use else f"{shared}{number}"
            _add(table, f"layers.{of}.{rest}", name, layer)
    return table.finished()


def _add(table: PieceTable, named: str, parameter: str, layer: Layer) -> None:
    parents, dot, _ = named.rpartition(".")
    table.same(parents + dot + torch_word(parameter), parameter, layer)
