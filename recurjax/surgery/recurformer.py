"""Heads of a trained Transformer replaced by Mamba, all other weights kept.

The paper starts Mamba from random numbers and leaves the rest to continual training.
`fit_mixers` is an option of ours: each layer's mixer first learns, alone, what the
replaced heads made of the same values in the base model.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Float, Int

from recurjax.errors import UserError
from recurjax.layers.mamba import Mamba
from recurjax.model import Decoder
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.surgery.recency import with_own_heads
from recurjax.types import Array, Scalar, Tokens
from recurjax.variants.recurformer import (
    MambaConfig,
    RecurFormerConfig,
    RecurFormerStack,
)
from recurjax.variants.recurformer.config import added_parameters, cache_bytes
from recurjax.variants.transformer import TransformerStack


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
      seed: seed of their weights.

    Raises:
      UserError: the model is not a Transformer, or these heads cannot be replaced.
    """
    base = with_own_heads(model)
    # The config rejects wrong heads, which are the user's mistake.
    try:
        stack = RecurFormerConfig(transformer=base, replaced=replaced, mamba=mamba)
    except ValueError as error:
        raise UserError(str(error)) from error
    config = dataclasses.replace(model.config, stack=stack)
    ours = to_nested_dict(model)
    blocks = ours["stack"].pop("blocks")
    layers = {}
    for layer in range(base.layers):
        # Stacked by place and repeat in the Transformer; by layer here, as layers
        # differ in shape.
        place, repeat = base.place_of(layer)
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
    """The effect of replaced heads on a model.

    Attributes:
      replaced: the heads of each layer.
      heads: how many the base has in all.
      added_parameters: the mixers' numbers less the queries and keys that went.
      cache_share: share of the base's cache at `length` tokens.
      flops, base_flops: training FLOPs per token of the stack at `length`, after and
        before.
    """

    replaced: tuple[tuple[int, ...], ...]
    heads: int
    added_parameters: int
    cache_share: float
    flops: float
    base_flops: float


def changes(model: Decoder, length: int) -> Changes:
    """Returns what a RecurFormer has gained and lost.

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
    remaining, key_heads = (
        np.array(heads.remaining, int),
        np.array(heads.key_heads, int),
    )
    # Heads are axis 1 of a matrix [D, H, E] and on axis 0 of a bias [H, E].
    for name, chosen, axis in (
        ("w_q", remaining, 1),
        ("w_k", key_heads, 1),
        ("b_q", remaining, 0),
        ("b_k", key_heads, 0),
    ):
        if name not in attention:
            continue
        if len(chosen):
            attention[name] = jnp.take(attention[name], chosen, axis=axis)
        else:
            del attention[name]
    # Where nothing attends any more there is nothing to normalise.
    if not len(remaining):
        attention.pop("q_norm", None)
        attention.pop("k_norm", None)


def _mixers(stack: RecurFormerConfig, seed: int) -> Iterable[tuple[int, dict]]:
    keys = jax.random.split(jax.random.key(seed), stack.layers)
    for layer, key in enumerate(keys):
        width = stack.heads(layer).mamba_width
        if width:
            rngs = nnx.Rngs(params=key)
            yield layer, to_nested_dict(Mamba(stack.mamba, width, rngs=rngs))


BATCH = 4
"""Texts in one step, and at once through a layer of the base."""


class MixerFit(NamedTuple):
    """The error of one layer's mixer against its heads.

    Attributes:
      layer: its number.
      before, after: the squared error as a share of the outputs' squares, on texts
        that were not fitted to (where there is more than one); 1: as good as silence.
    """

    layer: int
    before: float
    after: float


def fit_mixers(
    base: Decoder,
    model: Decoder,
    texts: Int[np.ndarray, "n T"],
    *,
    steps: int,
    rate: float,
    seed: int = 0,
    report: Callable[[MixerFit], None] = lambda fit: None,
) -> tuple[Decoder, list[MixerFit]]:
    """Fits each layer's Mamba to the outputs of the heads it replaces.

    Minimises the mean of (Mamba(v) - o)^2, v and o the values and outputs of these
    heads in the base, whose layers read what the base's own lower layers wrote: so the
    layers are independent, and errors do not pile up. Adam, its rate falling in a line
    to 0; every eighth of the texts, at least one, is kept to measure on.

    Args:
      base: the Transformer.
      model: what `to_recurformer` made of it.
      texts: token ids.
      steps: steps per layer, on `BATCH` texts each.
      rate: the first step's.
      seed: seed of the texts' order.
      report: gets each layer's errors as it is done.

    Returns:
      The model with fitted mixers, all else as it was, and the errors by layer.

    Raises:
      UserError: there is no text, steps or rate are not positive, or errors are not
        finite any more.
    """
    if not len(texts):
        raise UserError(
            "--text is empty, and the mixers are fitted to it: use more text"
        )
    if steps < 1 or not rate > 0:
        raise UserError(
            "fitting needs steps of at least 1 and a rate above 0, got "
            f"{steps} and {rate}"
        )
    assert isinstance(model.stack, RecurFormerStack)
    stack, layers = model.stack.config, model.stack.layers
    nested, fits = to_nested_dict(model), []
    # Values of the key heads that the replaced query heads read, in their order.
    heads = [stack.heads(layer) for layer in range(stack.layers)]
    groups = [(each.group_of, each.replaced) for each in heads]
    for layer, values, outputs in record_heads(base, texts, groups):
        if not groups[layer][1]:
            continue
        mamba, fit = _fitted(
            layers[layer].attention.mamba,
            # Side by side, as Mamba reads and writes them.
            values.reshape(*values.shape[:2], -1),
            outputs.reshape(*outputs.shape[:2], -1),
            layer=layer,
            steps=steps,
            rate=rate,
            seed=seed,
        )
        nested["stack"]["layers"][str(layer)]["attention"]["mamba"] = to_nested_dict(
            mamba
        )
        fits.append(fit)
        report(fit)
    return from_nested_dict(model, nested), fits


def record_heads(
    base: Decoder,
    texts: Int[np.ndarray, "n T"],
    groups: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields each layer's number, and values and outputs [n, T, chosen ones, E].

    Args:
      chosen: for each layer key heads, whose values are recorded, and query heads,
        whose outputs are; a key head may be named more than once.
    """
    stack = base.stack
    assert isinstance(stack, TransformerStack)
    config = stack.config
    parts = [texts[n : n + BATCH] for n in range(0, len(texts), BATCH)]
    states = [_embedded(base, ids) for ids in parts]
    cache = stack.init_cache(1, 0, states[0].dtype)
    for layer in range(config.layers):
        # Layers of one place in the pattern are stacked over the repeats.
        place, repeat = config.place_of(layer)
        block = jax.tree.map(lambda leaf, r=repeat: leaf[r], stack.blocks[place])
        group = cache.groups[place]._replace(
            position=cache.position, layer=jnp.int32(0)
        )
        # Filled batch by batch: all texts' heads exist once, and only the chosen ones.
        wide = np.promote_types(states[0].dtype, np.float32)
        E = config.attention.head_width
        arrays = [
            np.empty((*texts.shape, len(heads), E), wide) for heads in groups[layer]
        ]
        for number, x in enumerate(states):
            # The layer's own input goes on to its output: layers are run once, in turn.
            states[number], *both = _run_layer(block, group, x)
            rows = slice(number * BATCH, (number + 1) * BATCH)
            for array, heads, part in zip(arrays, groups[layer], both, strict=True):
                array[rows] = np.asarray(part)[:, :, list(heads)]
        values, outputs = arrays
        yield layer, values, outputs


def _embedded(base: Decoder, ids: np.ndarray) -> Float[Array, "B T D"]:
    # The states that enter the first layer, learned positions added.
    tokens = Tokens(jnp.asarray(ids))
    return next(iter(base.stack.layer_states(base.embed(tokens.ids), tokens)))


@jax.jit
def _run_layer(block: Any, group: Any, x: Float[Array, "B T D"]) -> tuple[Array, ...]:
    # The base's own norm and weights: what the heads made of these texts.
    v, o = block.attention.values_and_outputs(block.attention_input(x))
    after, _ = block(x, group, Tokens(jnp.zeros(x.shape[:2], jnp.int32)))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return after, v.astype(wide), o.astype(wide)


def _fitted(
    mamba: Mamba,
    v: np.ndarray,
    o: np.ndarray,
    *,
    layer: int,
    steps: int,
    rate: float,
    seed: int,
) -> tuple[Mamba, MixerFit]:
    held = max(1, len(v) // 8) if len(v) > 1 else 0
    fitted_to, measured = slice(None, len(v) - held), slice(-held or None, None)
    # Outputs of one layer are a hundred times those of another: errors are relative.
    squares = _squares(o[fitted_to]) / o[fitted_to].size
    size = jnp.asarray(max(squares, 1e-30), o.dtype)
    optimizer = optax.adam(1.0)
    moments = optimizer.init(mamba)  # pyright: ignore[reportArgumentType]
    before = _error(mamba, v[measured], o[measured])
    draw = np.random.default_rng([seed, layer])
    for step in range(steps):
        rows = draw.integers(len(v) - held, size=min(BATCH, len(v)))
        now = jnp.asarray(rate * (1 - step / steps))
        mamba, moments = _step(mamba, moments, v[rows], o[rows], size, now)
    after = _error(mamba, v[measured], o[measured])
    if not np.isfinite(after):
        raise UserError(
            f"the fit of layer {layer} diverged at --fit-rate {rate}: lower it"
        )
    return mamba, MixerFit(layer, before, after)


def _error(mamba: Mamba, v: np.ndarray, o: np.ndarray) -> float:
    wrong = sum(
        float(_squared(mamba, v[n : n + BATCH], o[n : n + BATCH]))
        for n in range(0, len(v), BATCH)
    )
    return wrong / max(_squares(o), 1e-30)


def _squares(o: np.ndarray) -> float:
    # One text at a time, because o may take most of the host's memory.
    return sum(float(np.square(text).sum()) for text in o)


@jax.jit
def _squared(mamba: Mamba, v: Array, o: Array) -> Scalar:
    y, _ = mamba(v, mamba.init_cache(len(v)))
    return jnp.sum(jnp.square(y - o))


@jax.jit
def _step(
    mamba: Mamba, moments: Any, v: Array, o: Array, size: Array, rate: Array
) -> tuple[Mamba, Any]:
    gradient = jax.grad(_squared)(mamba, v, o)
    # The squared error is divided by the outputs' squares, so that one rate serves
    # layers of very different sizes.
    gradient = jax.tree.map(lambda g: g / (size * o.size), gradient)
    updates, moments = optax.adam(1.0).update(gradient, moments)
    updates = jax.tree.map(lambda u: rate * u, updates)
    return optax.apply_updates(mamba, updates), moments  # pyright: ignore
