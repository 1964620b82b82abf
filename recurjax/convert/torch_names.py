"""The tensor names of our own PyTorch modules: one rule a parameter, any variant."""

import re

from recurjax.convert.pieces import Piece, PieceTable, is_stacked
from recurjax.model import ModelConfig

_RULES = (
    (r"\bw_(embedding|position)$", r"\1.weight", "plain"),
    (r"\bw_(value_embedding)$", r"\1.weight", "table"),
    (r"\bb_forget$", r"bias", "plain"),
    (r"\bw_(\w+)$", r"\1.weight", "linear"),
    (r"\bb_(\w+)$", r"\1.bias", "plain"),
    (r"\bscale$", "weight", "plain"),
    (r"\b(\w+_(?:scale|logits))$", r"\1", "plain"),
    (r"\bbias$", "bias", "plain"),
)
"""First match wins; matrices are turned to [out, in], the rest keeps its order."""

_BLOCK = re.compile(r"^stack\.blocks\.(?:(\d+)\.)?")


def torch_pieces(config: ModelConfig) -> list[Piece]:
    """Returns the table of a model: `layers.3.attention.q.weight` and so on."""
    table = PieceTable(config)
    places = {match[1] for name in table.shapes if (match := _BLOCK.match(name))}
    period = len(places)
    for name in table.shapes:
        match = _BLOCK.match(name)
        if match is None:
            # The table of learned positions belongs to the decoder, as embedding does.
            short = name.removeprefix("stack.position.")
            _add(table, re.sub(r"^stack\.", "layers.", short), name, None)
            continue
        rest, place = name[match.end() :], int(match[1] or 0)
        for index in range(table.shapes[name][0]):
            layer = index * period + place
            _add(table, f"layers.{layer}.{rest}", name, index)
    return table.finished()


def _add(table: PieceTable, named: str, parameter: str, layer: int | None) -> None:
    assert is_stacked(parameter) == (layer is not None)
    for pattern, replacement, kind in _RULES:
        if re.search(pattern, named):
            tensor = re.sub(pattern, replacement, named)
            adds = {"linear": table.linear, "table": table.table, "plain": table.plain}
            adds[kind](tensor, parameter, layer)
            return
    raise AssertionError(f"no rule names {parameter} in PyTorch")
