"""Models of fewer layers: some left out before a conversion, or the loops cut short."""

import dataclasses

import numpy as np

from recurjax.errors import UserError
from recurjax.model import Decoder
from recurjax.surgery.relaxed_recursive import (
    is_matrix,
    parameters,
    recursive_config,
    with_parameters,
)
from recurjax.surgery.shared_block import evenly_kept
from recurjax.variants.transformer import TransformerConfig


def with_evenly_kept_layers(model: Decoder, loops: int) -> Decoder:
    """Leaves out layers of a Transformer, so that the loops divide those that stay.

    Raises:
      UserError: the model is no Transformer, has fewer layers than loops, or has
        windows that differ by layer, whose pattern would not stay.
    """
    base = model.config.stack
    if not isinstance(base, TransformerConfig):
        raise UserError(
            "only a Transformer's layers can be left out: the model's stack is a "
            f"{type(base).__name__}"
        )
    if not 1 <= loops <= base.layers:
        raise UserError(f"loops must lie in 1..{base.layers}, got {loops}")
    # The largest multiple of the loops that the model has.
    kept = evenly_kept(base.layers, base.layers // loops * loops)
    if len(kept) == base.layers:
        return model
    if len(base.windows) > 1:
        raise UserError(
            f"layers cannot be left out of a model whose windows differ: {base.windows}"
        )
    # Stacked layers are cut along their leading axis; all else stays.
    made = {
        name: leaf[list(kept)] if name.startswith("stack.blocks.") else leaf
        for name, leaf in parameters(model).items()
    }
    stack = dataclasses.replace(base, layers=len(kept))
    return with_parameters(dataclasses.replace(model.config, stack=stack), made)


def truncated(model: Decoder, loops: int) -> Decoder:
    """Returns the model of the first loops: what an exit after them computes.

    Raises:
      UserError: the model is not recursive, has fewer loops, shares otherwise than by
        "cycle", or scales its branches by its depth.
    """
    stack = recursive_config(model)
    if not 1 <= loops <= stack.loops:
        raise UserError(f"loops must lie in 1..{stack.loops}, got {loops}")
    if loops == stack.loops:
        return model
    if stack.sharing != "cycle":
        raise UserError(
            f"only with sharing 'cycle' can loops be left out, not {stack.sharing!r}"
        )
    base = stack.transformer
    if base.residual_scale != "one":
        raise UserError(
            "loops cannot be left out of a model whose residual_scale depends on its "
            f"depth: {base.residual_scale!r}"
        )
    # The config's layers follow the loops; only what has a loop's axis is cut below.
    shorter = dataclasses.replace(base, layers=loops * stack.block_layers)
    cut = dataclasses.replace(stack, transformer=shorter, loops=loops)

    def leaf_of(name: str, leaf: np.ndarray) -> np.ndarray:
        # Additions and untied norms are each loop's own, the leading axis counting
        # loops; the block itself is shared and stays whole.
        own = name.startswith("stack.adapters.")
        untied = name.startswith("stack.blocks.") and not is_matrix(name)
        by_loop = own or (untied and not stack.tie_norms)
        return leaf[:loops] if by_loop else leaf

    made = {name: leaf_of(name, leaf) for name, leaf in parameters(model).items()}
    return with_parameters(dataclasses.replace(model.config, stack=cut), made)
