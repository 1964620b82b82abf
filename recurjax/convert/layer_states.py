"""The residual stream after each layer, to find the layer where two models part."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill import empty_cache, recurrent_prefill
from recurjax.model import Decoder
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.types import Array, Tokens
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerStack,
)
from recurjax.variants.latent_recurrent_transformer.block import Pass, Stream
from recurjax.variants.latent_recurrent_transformer.places import Whole
from recurjax.variants.latent_recurrent_transformer.recurrence import Memory, rms
from recurjax.variants.rat import RatStack
from recurjax.variants.recurrent_transformer import RecurrentTransformerStack
from recurjax.variants.recurrent_transformer.block import spec_of, weights_of
from recurjax.variants.transformer import TransformerStack


def in_float32(model: Decoder) -> Decoder:
    """Returns the same model with float32 activations."""
    config = dataclasses.replace(model.config, dtype="float32")
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return from_nested_dict(like, to_nested_dict(model))


def layer_states(
    model: Decoder, ids: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "M B T D"]:
    """Runs a model layer by layer.

    Returns:
      M = L + 1 states, counted as Hugging Face does: the first is the embedding, the
      last is after the final norm.

    Raises:
      NotImplementedError: a variant whose layers cannot be run one by one.
    """
    tokens = Tokens(jnp.asarray(ids, jnp.int32))
    states = list(_states(model.stack, model.embed(tokens.ids), tokens))
    states[-1] = model.final_norm(states[-1])
    return np.stack([np.asarray(state) for state in states])


def _states(stack, x: Array, tokens: Tokens) -> Iterator[Array]:
    match stack:
        case TransformerStack() | RatStack():
            yield from _of_blocks(stack, x, tokens)
        case RecurrentTransformerStack():
            yield from _of_recurrent(stack, x)
        case LatentRecurrentTransformerStack():
            yield from _of_latent(stack, x, tokens)
        case _:
            raise NotImplementedError(
                f"layer_states: {type(stack).__name__} has no layers to run one by one"
            )


def _of_blocks(
    stack: TransformerStack | RatStack, x: Array, tokens: Tokens
) -> Iterator[Array]:
    position = getattr(stack, "position", None)
    if position is not None:
        x = position(x, jnp.arange(x.shape[1])[None])
    yield x
    cache = stack.init_cache(x.shape[0], 0, x.dtype)
    period = len(stack.blocks)

    @jax.jit
    def run(block, group, x):
        return block(x, group._replace(position=cache.position, layer=0), tokens)[0]

    for layer in range(stack.config.layers):
        index, place = divmod(layer, period)
        own = jax.tree.map(lambda w, index=index: w[index], stack.blocks[place])
        x = run(own, cache.groups[place], x)
        yield x


def _of_recurrent(stack: RecurrentTransformerStack, x: Array) -> Iterator[Array]:
    if stack.position is not None:
        x = stack.position(x, jnp.arange(x.shape[1])[None])
    yield x
    dtype = x.dtype
    spec = spec_of(stack.config, dtype.name)
    run = jax.jit(partial(recurrent_prefill, spec=spec))
    weights, cache = weights_of(stack.blocks), empty_cache(1, x.shape[0], 0, spec)
    for layer in range(stack.config.layers):
        own = jax.tree.map(lambda w, r=layer: w[r : r + 1], weights)
        x, _ = run(x.astype(jnp.promote_types(dtype, jnp.float32)), own, cache)
        yield x.astype(dtype)


def _of_latent(
    stack: LatentRecurrentTransformerStack, x: Array, tokens: Tokens
) -> Iterator[Array]:
    """Runs all positions at once, on the memory that the exact recurrence gives them.

    With it they are what the recurrence makes of them, token after token.
    """
    yield x
    config, x0 = stack.config, rms(x)
    memory = None
    if config.memory is not None:
        memory = Memory(_entering(stack, x, tokens))
        memory = memory if stack.memory is None else stack.memory(memory)
    position = jnp.arange(x.shape[1])[None]
    seen = Pass(x0=x0, ids=tokens.ids, memory=memory, position=position)
    B, T, D = x.shape
    values, history = None, None
    if config.value_residual == "first":
        values = jnp.zeros((B, T, config.key_heads, config.head_width), x.dtype)
    if config.input_mixing == "dense":
        history = jnp.zeros((config.layers, B, T, D), x.dtype)
    stream = Stream(x0, values, history)

    @jax.jit
    def run(block, stream, layer):
        return block(stream, seen, Whole(kept=False), layer)[0]

    for layer in range(config.layers):
        index, place = divmod(layer, config.pattern)
        own = jax.tree.map(lambda w, index=index: w[index], stack.blocks[place])
        stream = run(own, stream, jnp.int32(layer))
        yield stream.x


def _entering(
    stack: LatentRecurrentTransformerStack, x: Array, tokens: Tokens
) -> Float[Array, "B T D"]:
    """Returns what enters each token in the exact recurrence."""

    def advance(cache, column):
        x, ids = column
        one = Tokens(ids[:, None])
        entering = stack.memory_of_token(x[:, None], cache, one)
        _, cache = stack(x[:, None], cache, one)
        return cache, entering[:, 0]

    cache = stack.init_cache(x.shape[0], x.shape[1], x.dtype)
    columns = (jnp.swapaxes(x, 0, 1), tokens.ids.T)
    _, memory = jax.jit(partial(jax.lax.scan, advance))(cache, columns)
    return jnp.swapaxes(memory, 0, 1)
