"""Heads of a trained Transformer replaced by Mamba, all other weights kept."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recurjax.errors import UserError
from recurjax.model import Decoder
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.recurformer.cost import added_parameters, cache_bytes
from recurjax.variants.recurformer.mamba import Mamba
from recurjax.variants.transformer import TransformerConfig


def to_recurformer(
    model: Decoder,
    replaced: tuple[tuple[int, ...], ...],
    *,
    mamba: MambaConfig,
    seed: int = 0,
) -> Decoder:
    """Makes a RecurFormer of a Transformer.

    The remaining heads keep their queries and the key heads they read their keys; all
    values, the output weight, norms and MLPs stay as they are. Mamba starts as its
    authors' does. With nothing replaced the model is the same function.

    Args:
      model: a Transformer.
      replaced: for each layer the heads to replace, ascending.
      mamba: sizes of the mixers.
      seed: of their weights.

    Raises:
      UserError: the model is no Transformer, or these heads cannot be replaced.
    """
    base = model.config.stack
    if not isinstance(base, TransformerConfig):
        raise UserError(
            "only heads of a Transformer can be replaced: the model's stack is a "
            f"{type(base).__name__}"
        )
    # What a config refuses here is a mistake in the chosen heads: one sentence.
    try:
        stack = RecurFormerConfig(transformer=base, replaced=replaced, mamba=mamba)
    except ValueError as error:
        raise UserError(str(error)) from error
    config = dataclasses.replace(model.config, stack=stack)
    ours = to_nested_dict(model)
    blocks = ours["stack"].pop("blocks")
    P = len(base.windows)
    layers = {}
    for layer in range(base.layers):
        # Stacked by place and repeat in the Transformer; by layer here, as layers
        # differ in shape.
        place, repeat = layer % P, layer // P
        block = jax.tree.map(lambda leaf, r=repeat: leaf[r], blocks[str(place)])
        if replaced[layer]:
            _keep_heads(block["attention"], stack, layer)
        layers[str(layer)] = block
    ours["stack"]["layers"] = layers
    # Only the mixers' own weights are drawn; the rest of the new model is overwritten.
    for layer, weights in _mixers(stack, seed):
        layers[str(layer)]["attention"]["mamba"] = weights
    # Only names and shapes: the weights are ours.
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return from_nested_dict(like, ours)


class Changes(NamedTuple):
    """What replacing heads has done to a model.

    Attributes:
      replaced: the heads of each layer.
      heads: how many the base has in all.
      added_parameters: the mixers' numbers less the queries and keys that went.
      cache_share: of the base's cache at `length` tokens.
      flops, base_flops: of the stack's training, a token of `length`, now and before.
    """

    replaced: tuple[tuple[int, ...], ...]
    heads: int
    added_parameters: int
    cache_share: float
    flops: float
    base_flops: float


def changes(model: Decoder, length: int) -> Changes:
    """Says what a RecurFormer has gained and lost.

    Args:
      length: tokens at which cache and FLOPs are counted.
    """
    stack = model.config.stack
    assert isinstance(stack, RecurFormerConfig)
    return Changes(
        replaced=stack.replaced,
        heads=stack.layers * stack.transformer.attention.heads,
        added_parameters=added_parameters(stack),
        cache_share=cache_bytes(stack, length).share,
        flops=stack.flops_per_token(length),
        base_flops=stack.transformer.flops_per_token(length),
    )


def _keep_heads(attention: dict, stack: RecurFormerConfig, layer: int) -> None:
    """Cuts a layer's queries and keys down to the heads that still attend."""
    heads = stack.heads(layer)
    left, kept = np.array(heads.remaining, int), np.array(heads.key_heads, int)
    # Heads lie on axis 1 of a matrix [D, H, E] and on axis 0 of a bias [H, E].
    for name, chosen, axis in (
        ("w_q", left, 1),
        ("w_k", kept, 1),
        ("b_q", left, 0),
        ("b_k", kept, 0),
    ):
        if name not in attention:
            continue
        if len(chosen):
            attention[name] = jnp.take(attention[name], chosen, axis=axis)
        else:
            del attention[name]
    # Where nothing attends any more there is nothing to normalise.
    if not len(left):
        attention.pop("q_norm", None)
        attention.pop("k_norm", None)


def _mixers(stack: RecurFormerConfig, seed: int) -> Iterable[tuple[int, dict]]:
    keys = jax.random.split(jax.random.key(seed), stack.layers)
    for layer, key in enumerate(keys):
        width = stack.heads(layer).mamba_width
        if width:
            rngs = nnx.Rngs(params=key)
            yield layer, to_nested_dict(Mamba(stack.mamba, width, rngs=rngs))
