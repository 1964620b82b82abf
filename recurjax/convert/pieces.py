"""The map between parameters and tensors on disk: parts and layouts.

A table of pieces is all that tells one checkpoint format from another; reading and
writing walk it in opposite directions and only copy numbers, so that a round trip is
bit-exact.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from recurjax.convert.formats.tensors import FLOATS, TensorSource
from recurjax.errors import UserError, first_few
from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import parameter_name, rule_of

Layer = int | tuple[int, ...] | None
"""Which layer of a stacked parameter: of a block that loops, loop and layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One parameter, or one layer of a stacked one.

        ours = disk.reshape(view)[part].transpose(axes).reshape(result)

    Attributes:
      tensor: its name on disk; shape: the whole tensor's shape there.
      parameter: our name; layer: the place on its leading axis, or on as many as
        there are numbers; None: all of it.
      view, part, axes, result: see the equation; `result` is our shape.
    """

    tensor: str
    shape: tuple[int, ...]
    parameter: str
    layer: Layer
    view: tuple[int, ...]
    part: tuple[Any, ...]
    axes: tuple[int, ...]
    result: tuple[int, ...]

    def take(self, disk: np.ndarray) -> np.ndarray:
        """Cuts our array out of the tensor."""
        return (
            disk.reshape(self.view)[self.part].transpose(self.axes).reshape(self.result)
        )

    def put(self, disk: np.ndarray, ours: np.ndarray) -> None:
        """Writes our array into the tensor, the inverse of `take`."""
        # `take` turned round: undo the reshape, then the transpose.
        target = disk.reshape(self.view)[self.part]
        turned = [target.shape[axis] for axis in self.axes]
        ours = ours.reshape(turned).transpose(np.argsort(self.axes))
        np.copyto(target, ours, casting="unsafe")


class PieceTable:
    """Collects the pieces of one model; our shapes come from its config."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.shapes = {name: leaf.shape for name, leaf in leaves(config).items()}
        self.pieces: list[Piece] = []

    def has(self, parameter: str) -> bool:
        """Whether the model has this parameter."""
        return parameter in self.shapes

    def same(self, tensor: str, parameter: str, layer: Layer = None) -> None:
        """Adds a parameter that is an entire tensor, in the layout of its role.

        A matrix is [out, in]; a table keeps its rows, and what a row holds is one
        axis; a vector is flat. Parameters that the model lacks are left.
        """
        # Models of one table differ in what they have: biases, gates, norms.
        if not self.has(parameter):
            return
        result, role = self._result(parameter, layer), rule_of(parameter).role
        if role == "matrix":
            shape = self.linear_shape(parameter, layer)
            self.part(tensor, parameter, layer, shape=shape, axes=(1, 0))
        elif role == "table":
            shape = (result[0], math.prod(result[1:]))
            self.part(tensor, parameter, layer, shape=shape, axes=(0, 1))
        else:
            shape = (math.prod(result),)
            self.part(tensor, parameter, layer, shape=shape, axes=(0,))

    def linear_shape(self, parameter: str, layer: Layer) -> tuple[int, int]:
        """Returns [out, in] of one layer's matrix; ours is [in ..., out ...]."""
        # Ours keeps heads apart on several axes; on disk all outputs are one axis.
        result, inputs = self._result(parameter, layer), rule_of(parameter).inputs
        return math.prod(result[inputs:]), math.prod(result[:inputs])

    def part(
        self,
        tensor: str,
        parameter: str,
        layer: Layer = None,
        *,
        shape: tuple[int, ...],
        view: tuple[int, ...] | None = None,
        part: tuple[Any, ...] = (),
        axes: tuple[int, ...] = (1, 0),
    ) -> None:
        """Adds a part of a tensor; see `Piece`. Parameters the model lacks are left."""
        if not self.has(parameter):
            return
        self.pieces.append(
            Piece(
                tensor=tensor,
                shape=shape,
                parameter=parameter,
                layer=layer,
                view=shape if view is None else view,
                part=part,
                axes=axes,
                result=self._result(parameter, layer),
            )
        )

    def rows(
        self,
        tensor: str,
        parameters: Iterable[str],
        layer: Layer = None,
        *,
        inputs_first: bool = False,
    ) -> None:
        """Adds matrices or biases that follow each other in a tensor's rows.

        Args:
          inputs_first: matrices are [in, out], one after another in its columns.
        """
        names = [name for name in parameters if self.has(name)]
        if not names:
            return
        if rule_of(names[0]).role == "matrix":
            sizes = [self.linear_shape(name, layer) for name in names]
        else:
            sizes = [(math.prod(self._result(name, layer)),) for name in names]
        # Rows one below the other: outputs add up, inputs are alike.
        shape = (sum(size[0] for size in sizes), *sizes[0][1:])
        # A matrix is turned from [out, in] to ours, [in, out]; a bias has one axis.
        axes = (1, 0) if len(shape) == 2 else (0,)
        columns = inputs_first and len(shape) == 2
        if columns:
            shape, axes = shape[::-1], (0, 1)
        start = 0
        for name, size in zip(names, sizes, strict=True):
            part = (slice(start, start + size[0]),)
            part = (slice(None), *part) if columns else part
            self.part(tensor, name, layer, shape=shape, part=part, axes=axes)
            start += size[0]

    def unnamed(self) -> list[str]:
        """Returns our parameters that no tensor holds."""
        named = {piece.parameter for piece in self.pieces}
        return sorted(set(self.shapes) - named)

    def finished(self) -> list[Piece]:
        """Returns the table; every parameter is in it, every layer once."""
        # Every layer of every stacked parameter, once each.
        expected = {
            (name, layer)
            for name, shape in self.shapes.items()
            for layer in layers_of(name, shape)
        }
        places = [(piece.parameter, piece.layer) for piece in self.pieces]
        assert len(places) == len(set(places)), "a parameter is in the table twice"
        assert set(places) == expected, sorted(expected ^ set(places), key=str)
        return self.pieces

    def _result(self, parameter: str, layer: Layer) -> tuple[int, ...]:
        # What is left after the leading axes, of which `layer` says one entry each.
        return self.shapes[parameter][len(indices(layer)) :]


def leaves(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a model's parameters by name, without making them."""
    abstract = jax.eval_shape(
        lambda key: Decoder(config, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    return {
        parameter_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
    }


def layers_of(parameter: str, shape: tuple[int, ...]) -> list[Layer]:
    """Returns every place on a parameter's leading axes, [None] where it has none.

    They are those beyond what the table of parameters says of one layer: none, the
    layers, or the loops and the layers.
    """
    if not parameter.startswith(("stack.blocks.", "stack.adapters.")):
        return [None]
    axes = rule_of(parameter).axes.replace("->", " ").split()
    # A rule names the axes of one layer's array, the heads and widths; what the
    # parameter has in front of them counts its copies.
    leading = shape[: len(shape) - len(axes)]
    if len(leading) == 1:
        return list(range(leading[0]))
    return list(itertools.product(*map(range, leading)))


def indices(layer: Layer) -> tuple[int, ...]:
    """Returns one number for each leading axis."""
    if layer is None:
        return ()
    return (layer,) if isinstance(layer, int) else layer


def check_tensors(
    pieces: Iterable[Piece],
    source: TensorSource,
    *,
    ignored: Iterable[str] = (),
) -> None:
    """Compares a checkpoint with the table.

    Args:
      pieces: what the model wants.
      source: what there is.
      ignored: names on disk that may be there and are not read.

    Raises:
      UserError: tensors missing, unknown, of another shape or no floats; the
        first few are named.
    """
    expected: Mapping[str, tuple[int, ...]] = {p.tensor: p.shape for p in pieces}
    # Collect all differences before raising, so that a user sees in one run
    # whether a name, a size or the entire model differs.
    there, mismatches = source.tensors, []
    for name, shape in expected.items():
        if name not in there:
            mismatches.append(f"{name} is missing")
            continue
        if there[name].shape != shape:
            mismatches.append(f"{name} has shape {there[name].shape}, not {shape}")
        if there[name].dtype not in FLOATS:
            mismatches.append(
                f"{name} has dtype {there[name].dtype}, not one of {', '.join(FLOATS)}"
            )
    # A tensor that nothing reads would be a part of the model silently left out.
    mismatches += [
        f"{name} is not a tensor of this model"
        for name in sorted(set(there) - set(expected) - set(ignored))
    ]
    if mismatches:
        raise UserError(
            f"{source.where} does not fit its model: {first_few(mismatches)}"
        )
