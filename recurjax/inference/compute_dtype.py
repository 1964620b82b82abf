"""Prepares weights for generation: their compute dtype and their memory layout.

Both happen once, before generation, instead of in every call.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental.layout import Format, Layout

from pallas_kernels import target
from recurjax.model import Decoder
from recurjax.parameters import parameter_name, rule_of


def in_compute_dtype(model: Decoder) -> Decoder:
    """Returns the model with its matrices and tables in the dtype of its activations.

    Every product rounds its weight to that dtype anyway, so that nothing computed
    changes by a bit; but a decode step is bound by reading the weights, and with
    bfloat16 reads half as much. Norms' scales, biases and other vectors, which are used
    in float32, stay. On a TPU weights also have the layout of `layout_of`, unless they
    are
    traced: a program's results have no layout of their own. The result is for reading
    texts, not for training.
    """

    def prepare(leaf: Any, dtype: Any, layout: Layout | None) -> Any:
        if layout is None or isinstance(leaf, Tracer):
            return leaf.astype(dtype)
        if leaf.dtype == dtype and leaf.format.layout.major_to_minor == (
            layout.major_to_minor
        ):
            return leaf  # prepared before
        return jax.device_put(leaf.astype(dtype), Format(layout, leaf.sharding))

    return _map_weights(prepare, model)


def multiplied_shapes(model: Decoder) -> Decoder:
    """Returns what `in_compute_dtype` makes of a model of which only shapes are known.

    Args:
      model: a model of ShapeDtypeStructs with their shardings.
    """

    def shape(leaf: Any, dtype: Any, layout: Layout | None) -> jax.ShapeDtypeStruct:
        where = leaf.sharding if layout is None else Format(layout, leaf.sharding)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=where)

    return _map_weights(shape, model)


def cache_dtype(model: Decoder) -> str:
    """Returns float32 for bfloat16 models on CPU, where it holds the same values.

    XLA's CPU backend widens and narrows all of a bfloat16 cache to write one token.
    """
    dtype = model.config.dtype
    widens = target.widens_bfloat16()
    return "float32" if widens and dtype == "bfloat16" else dtype


def layout_of(name: str, axes: int) -> Layout | None:
    """Returns the best layout of a weight; None: the default layout.

    A TPU multiplies by tiles of a weight's last two axes and takes a projection [D, H,
    E] as one matrix [D, H E], which does not match memory tiled by [H, E]. So XLA
    transposes all layers' projections in every call and writes the copies to memory, a
    quarter of a Transformer's weights. At each layer of a Latent Recurrent Transformer
    it also moves one of the copies to the chip and back. With D last, XLA reads them in
    place, as [H E, D].

    Args:
      axes: number of axes of the array, with those of stacked layers.
    """
    rule = rule_of(name)
    by_head = rule.role == "matrix" and rule.inputs == 1 and len(rule.outputs) == 2
    # RAT combines keys, values and gates per channel: XLA would transpose their
    # projections back.
    if not by_head or ".mixer." in name or not target.tiles_memory():
        return None
    *layers, inputs, heads, channels = range(axes)
    return Layout((*layers, heads, channels, inputs))


def _map_weights(apply: Callable[[Any, Any, Layout | None], Any], model: Decoder):
    """Maps each parameter with the dtype and the layout that it is to have."""

    def cast(path: Any, leaf: Any) -> Any:
        name = parameter_name(path)
        # A quantized weight's integers stay; its product dequantizes them.
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return apply(leaf, leaf.dtype, None)
        # The table of parameters says which are weights, not the array's rank.
        dtype = model.config.dtype if rule_of(name).is_weight else leaf.dtype
        return apply(leaf, dtype, layout_of(name, leaf.ndim))

    return jax.tree_util.tree_map_with_path(cast, model)
