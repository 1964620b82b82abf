"""Weights in the dtype in which they are multiplied."""

import jax

from recurjax.model import Decoder
from recurjax.parameters import parameter_name, rule_of


def in_compute_dtype(model: Decoder) -> Decoder:
    """Returns the model with its matrices and tables in the dtype of its activations.

    Every product rounds its weight to that dtype anyway, so that nothing computed
    changes by a bit; but a decode step is bound by reading the weights, and with
    bfloat16 reads half as much. Norms' scales, biases and other vectors, which are used
    in float32, stay. The result is for reading texts, not for training.
    """
    dtype = model.config.dtype

    def cast(path, leaf):
        # The table of parameters says which are weights, not the array's rank.
        weight = rule_of(parameter_name(path)).is_weight
        return leaf.astype(dtype) if weight else leaf

    return jax.tree_util.tree_map_with_path(cast, model)
