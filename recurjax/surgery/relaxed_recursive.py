"""A Transformer made recursive, and a recursive model made a Transformer.

In numpy, tensor by tensor; nothing here is differentiated.
"""

import dataclasses
import re
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from recurjax.errors import UserError
from recurjax.model import Decoder
from recurjax.surgery.named_parameters import (
    made_by,
    named_leaves,
    on_host,
    stacked,
)
from recurjax.surgery.recursive_parts import (
    MAPS,
    RecursiveParts,
    Start,
    TiedNorms,
    flat,
    is_matrix,
)
from recurjax.surgery.shared_block import BlockInit
from recurjax.types import Array
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.relaxed_recursive_transformer.block import depths_of
from recurjax.variants.transformer import TransformerConfig


def to_recursive(
    model: Decoder,
    stack: RelaxedRecursiveTransformerConfig,
    *,
    init: BlockInit,
    adapters: Literal["svd", "zero"] = "svd",
    fused_qkv: bool = False,
    norms: TiedNorms | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> Decoder:
    """Makes a Transformer recursive: a shared block, and additions towards its layers.

    Embedding, final norm and head are copied. Untied norms and biases are each layer's
    own; tied ones start as the matrices do.

    Args:
      model: a Transformer.
      stack: what it becomes; its `transformer` is the model's own config.
      init: see `BlockInit`.
      adapters: "svd": the best of their rank, see `low_rank_factors`; "zero": they add
        nothing yet. Where there is nothing to add, they start as "zero" either way.
      fused_qkv: take the factors of q, k and v side by side, so that they share A; for
        models that have them as one matrix.
      norms: how tied norms start; None: as the matrices do. Biases of linear maps do.
      seed: of a random block, and of the drawn A where nothing is added.
      mesh: that the model lies on, and what it becomes; None: one device.

    Raises:
      UserError: the model is no Transformer, or another one than `stack` says.
    """
    base = model.config.stack
    if not isinstance(base, TransformerConfig):
        raise UserError(
            "only a Transformer can be made recursive: the model's stack is a "
            f"{type(base).__name__}"
        )
    if stack.transformer != base:
        raise UserError("stack.transformer must be the model's own stack, unchanged")
    if norms is not None and not stack.tie_norms:
        raise UserError(
            f"norms {norms!r} is for norms that the loops share: own ones (tie_norms "
            "off) are each layer's"
        )
    config = dataclasses.replace(model.config, stack=stack)
    start = Start(
        init=init, adapters=adapters, fused_qkv=fused_qkv, norms=norms, seed=seed
    )
    return made_by(config, RecursiveParts(model, config, start), mesh=mesh)


def to_transformer(model: Decoder, *, mesh: Mesh | None = None) -> Decoder:
    """Writes a recursive model out: an ordinary Transformer of L layers that is equal.

    Each depth's matrices are W + A B, multiplied in float64.

    Args:
      mesh: that the model lies on, and what it becomes; None: one device.

    Raises:
      UserError: the model is not recursive, or its deeper loops read loop 1's keys and
        values, which no Transformer does.
    """
    stack = recursive_config(model)
    if stack.loop_cache == "first" and stack.loops > 1:
        raise UserError(
            "a model with loop_cache 'first' is no Transformer: its deeper loops have "
            "no keys and values of their own"
        )
    config = dataclasses.replace(model.config, stack=stack.transformer)
    ours, P = named_leaves(model), len(stack.transformer.windows)
    depths = depths_of(stack.layers, stack.loops, stack.sharing)

    def make(name: str) -> np.ndarray | Array:
        block = re.match(r"stack\.blocks\.(\d+)\.(.*)", name)
        if block is None:
            return ours[name]
        place, inner = int(block[1]), block[2]

        def layer(repeat: int) -> np.ndarray:
            [[b, k]] = np.argwhere(depths == place + repeat * P).tolist()
            return _of_use(ours, stack, inner, b, k)

        return stacked(stack.layers // P, layer)

    return made_by(config, make, mesh=mesh)


def recursive_stack(
    model: Decoder, **settings: Any
) -> RelaxedRecursiveTransformerConfig:
    """Returns the constraint that makes a Transformer recursive, for `to_recursive`.

    Args:
      settings: loops, sharing, rank, tie_norms, loop_cache.

    Raises:
      UserError: the model is no Transformer, or cannot be cut so.
    """
    base = model.config.stack
    if not isinstance(base, TransformerConfig):
        raise UserError(
            "only a Transformer can be made recursive: the model's stack is a "
            f"{type(base).__name__}"
        )
    try:
        return RelaxedRecursiveTransformerConfig(transformer=base, **settings)
    except ValueError as error:
        raise UserError(str(error)) from error


def recursive_config(model: Decoder) -> RelaxedRecursiveTransformerConfig:
    """Returns a recursive model's stack.

    Raises:
      UserError: the model is not recursive.
    """
    stack = model.config.stack
    if not isinstance(stack, RelaxedRecursiveTransformerConfig):
        raise UserError(
            f"the model is not recursive: its stack is a {type(stack).__name__}"
        )
    return stack


def _of_use(
    ours: dict[str, Array],
    stack: RelaxedRecursiveTransformerConfig,
    name: str,
    b: int,
    k: int,
) -> np.ndarray:
    """Returns a parameter of the block's layer k as its b-th use has it."""
    repeat, place = divmod(k, len(stack.transformer.windows))
    leaf = ours[f"stack.blocks.{place}.{name}"]
    by_use = not stack.tie_norms and not is_matrix(name)
    found = on_host(leaf[b, repeat] if by_use else leaf[repeat])
    linear = {weight: linear for linear, weight in MAPS.items()}.get(name)
    if linear is None or not stack.rank:
        return found
    # The addition joined in.
    reduce, expand = (
        on_host(ours[f"stack.adapters.{place}.{linear}.w_{side}"][b, repeat])
        for side in ("reduce", "expand")
    )
    whole = flat(name, found)
    whole += reduce.astype(np.float64) @ expand.astype(np.float64)
    return whole.reshape(found.shape).astype(found.dtype)
