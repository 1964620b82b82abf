"""Low-rank adapters of a frozen model: adding them, merging them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from recurjax.errors import UserError
from recurjax.layers.linear import AdaptedWeight, is_composed, plain
from recurjax.model import Decoder, in_weight_dtype
from recurjax.parameters import is_layer_matrix, parameter_name, rule_of
from recurjax.training.config import AdapterConfig, TrainingConfig, parse_adapters
from recurjax.types import Array

_NAMES = ("q", "k", "v", "out", "up", "gate", "down", "u", "z", "x", "back")
"""Attention's, the MLP's and Mamba's projections."""


def adapted(model: Decoder, training: TrainingConfig) -> Decoder:
    """Returns a base with the adapters of a run's settings at their start, if any."""
    if training.adapters is None:
        return model
    key = jax.random.key(training.seed)
    return with_adapters(model, parse_adapters(training.adapters), key)


def with_adapters(model: Decoder, config: AdapterConfig, key: Array) -> Decoder:
    """Returns the model with adapters that add nothing yet: A is drawn, B is zero.

    Args:
      model: has no adapters; its weights are not copied.
      config: see there.
      key: A is uniform in +-1/sqrt(N), as PEFT draws it.

    Raises:
      UserError: a name that no matrix of the stack has, or a rank above the smaller
        side of a matrix.
    """
    if config.rank == 0:
        return model
    paths = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_composed)
    names = [parameter_name(path) for path, _ in paths]
    adaptable = [name for name in names if is_layer_matrix(name)]
    there = sorted({_word(name) for name in adaptable})
    for name in config.names:
        if name not in there:
            raise UserError(
                f"training.adapters: no matrix of the stack is named {name}; it has "
                f"{', '.join(there)}"
            )
    words = config.names or _NAMES
    matching = [name for name in adaptable if _word(name) in words]
    keys = dict(zip(matching, jax.random.split(key, len(matching)), strict=True))

    def add(path: tuple[Any, ...], leaf: Any) -> Any:
        name = parameter_name(path)
        if name not in keys:
            return leaf
        rule, R = rule_of(name), config.rank
        layers = len(leaf.shape) - rule.inputs - len(rule.outputs)
        N = math.prod(leaf.shape[layers : layers + rule.inputs])
        M = math.prod(leaf.shape[layers + rule.inputs :])
        if min(N, M) < R:
            raise UserError(
                f"training.adapters: rank {R} exceeds the smaller side of {name}, a "
                f"matrix of {N} x {M}: use at most {min(N, M)}, or name other matrices"
            )
        leading, bound = leaf.shape[:layers], N**-0.5
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        return AdaptedWeight(
            base=leaf,
            lora_a=jax.random.uniform(
                keys[name], (*leading, N, R), dtype, -bound, bound
            ),
            lora_b=jnp.zeros((*leading, R, M), dtype),
            scale=config.scale,
        )

    return jax.tree_util.tree_map_with_path(add, model, is_leaf=is_composed)


def with_several(base: Decoder, adapters: Sequence[Any]) -> Decoder:
    """Returns a base with several adapters, of which each row of a batch has one.

    Number 0 adds nothing, number n is `adapters[n - 1]`: see `linear.for_rows`. Ranks
    are padded to the largest, and scales multiply B, so that programs depend on the
    number of adapters and on the largest rank alone.

    Args:
      adapters: models on this base, of which only the adapters are read.
    """
    every = [_adapted_weights(model) for model in adapters]

    def add(path: tuple[Any, ...], leaf: Any) -> Any:
        some = [weights.get(parameter_name(path)) for weights in every]
        ranks = [0 if node is None else node.lora_a.shape[-1] for node in some]
        if not any(ranks):
            return leaf
        like = next(node for node in some if node is not None)
        a, b = [jnp.zeros_like(like.lora_a)], [jnp.zeros_like(like.lora_b)]
        for node in some:
            a.append(a[0] if node is None else node.lora_a)
            b.append(b[0] if node is None else node.lora_b * node.scale)
        return AdaptedWeight(
            base=leaf,
            lora_a=_stacked(a, -1, max(ranks)),
            lora_b=_stacked(b, -2, max(ranks)),
            several=len(a),
        )

    return jax.tree_util.tree_map_with_path(add, base, is_leaf=is_composed)


def _stacked(parts: list[Array], axis: int, rank: int) -> Array:
    """Stacks matrices in front of their two axes, one of which is padded to a rank."""

    def padded(part: Array) -> Array:
        widths = [(0, 0)] * part.ndim
        widths[axis] = (0, rank - part.shape[axis])
        return jnp.pad(part, widths)

    return jnp.stack([padded(part) for part in parts], axis=-3)


def _adapted_weights(model: Any) -> dict[str, AdaptedWeight]:
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_composed)
    return {parameter_name(path): x for path, x in leaves if _is_adapted(x)}


def merged(model: Decoder) -> Decoder:
    """Returns the model as plain float32 arrays, W + s A B where it had an adapter."""
    arrays = jax.tree.map(plain, model, is_leaf=_is_adapted)
    return in_weight_dtype(arrays, "float32")


def _is_adapted(node: Any) -> bool:
    return isinstance(node, AdaptedWeight)


def _word(name: str) -> str:
    return name.rpartition(".w_")[2]
