"""Models of other depths: layers left out before a conversion, fewer or more loops."""

import dataclasses

import jax.numpy as jnp
from jax.sharding import Mesh

from recurjax.errors import UserError
from recurjax.model import Decoder
from recurjax.surgery.named_parameters import made_by, named_leaves
from recurjax.surgery.relaxed_recursive import (
    evenly_kept,
    is_matrix,
    loopable,
    recursive_config,
)
from recurjax.types import Array


def with_evenly_kept_layers(
    model: Decoder, loops: int, *, mesh: Mesh | None = None
) -> Decoder:
    """Leaves out layers of a model, so that the loops divide those that stay.

    Args:
      mesh: mesh of the model and of the result; None: one device.

    Raises:
      UserError: the model's layers cannot be looped, are fewer than the loops, or
        differ in their windows or mixers, whose pattern would not stay.
    """
    base = loopable(model)
    if not 1 <= loops <= base.layers:
        raise UserError(f"loops must be in 1..{base.layers}, got {loops}")
    # The largest multiple of the loops that the model has.
    layers = evenly_kept(base.layers, base.layers // loops * loops)
    if len(layers) == base.layers:
        return model
    if len(base.pattern) > 1:
        raise UserError(
            "layers cannot be removed from a model whose windows, positions or mixers "
            f"differ by layer: {base.pattern}"
        )
    ours, rows = named_leaves(model), jnp.array(layers)

    def make(name: str) -> Array:
        # Stacked layers are cut along their leading axis; all else stays.
        return ours[name][rows] if name.startswith("stack.blocks.") else ours[name]

    stack = dataclasses.replace(base, layers=len(layers))
    return made_by(dataclasses.replace(model.config, stack=stack), make, mesh=mesh)


def truncated(model: Decoder, loops: int) -> Decoder:
    """Returns the model of the first loops: what an exit after them computes.

    Raises:
      UserError: the model is not recursive, has fewer loops, shares otherwise than by
        "cycle", or scales its branches by its depth.
    """
    stack = recursive_config(model)
    if not 1 <= loops <= stack.loops:
        raise UserError(f"loops must be in 1..{stack.loops}, got {loops}")
    return with_loops(model, loops)


def extended(model: Decoder, loops: int) -> Decoder:
    """Returns the model whose block runs more often than it was trained to.

    Additions and norms that belong to a loop are the deepest loop's in all further
    ones. The first loops compute what they did.

    Raises:
      UserError: the model is not recursive, has more loops, shares otherwise than by
        "cycle", or scales its branches by its depth.
    """
    stack = recursive_config(model)
    if loops < stack.loops:
        raise UserError(f"loops must be at least {stack.loops}, got {loops}")
    return with_loops(model, loops)


def with_loops(model: Decoder, loops: int) -> Decoder:
    """Returns the model of another number of loops: `truncated` or `extended`."""
    stack = recursive_config(model)
    if loops == stack.loops:
        return model
    if stack.sharing != "cycle" and (loops, stack.loops) != (1, 1):
        raise UserError(
            "loops can be removed or added with sharing 'cycle' only, got "
            f"{stack.sharing!r}"
        )
    base = stack.transformer
    if base.residual_scale != "one":
        raise UserError(
            "loops can be removed or added with residual_scale 'one' only, "
            "because other scales depend on the depth, got "
            f"{base.residual_scale!r}"
        )
    # The config's layers follow the loops; only what has a loop's axis changes below.
    layers = dataclasses.replace(base, layers=loops * stack.block_layers)
    changed = dataclasses.replace(stack, transformer=layers, loops=loops)
    ours = named_leaves(model)
    rows = jnp.minimum(jnp.arange(loops), stack.loops - 1)

    def make(name: str) -> Array:
        # Additions and untied norms are each loop's own, the leading axis counting
        # loops; the block itself is shared and does not change.
        is_addition = name.startswith("stack.adapters.")
        untied = name.startswith("stack.blocks.") and not is_matrix(name)
        by_loop = is_addition or (untied and not stack.tie_norms)
        return ours[name][rows] if by_loop else ours[name]

    return made_by(dataclasses.replace(model.config, stack=changed), make)
