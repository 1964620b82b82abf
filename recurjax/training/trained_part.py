"""The parameters that a step changes, apart from those it leaves alone."""

import re
from typing import Any

import jax
import optax

from recurjax.errors import UserError
from recurjax.model import Decoder
from recurjax.parameters import parameter_name


def trained_part(model: Decoder, pattern: str | None) -> Any:
    """Returns a model without the parameters that are not trained.

    In their places are nodes without leaves, as in optax's masks: gradients, moments
    and decay of such a tree are those of the rest alone, under the same names.

    Args:
      pattern: see `training.train_only`; None: the model as it is.
    """
    if pattern is None:
        return model
    found = re.compile(pattern)

    def keep(path: tuple[Any, ...], leaf: Any) -> Any:
        # A place without leaves: tree functions pass it by.
        return leaf if found.search(parameter_name(path)) else optax.MaskedNode()

    return jax.tree_util.tree_map_with_path(keep, model)


def whole_model(trained: Any, model: Decoder) -> Decoder:
    """Returns a model with the trained part in the place of its own."""
    return jax.tree.map(
        lambda new, old: old if _left_out(new) else new,
        trained,
        model,
        is_leaf=_left_out,
    )


def check_trained_part(model: Decoder, pattern: str | None) -> None:
    """Raises UserError for a pattern that no parameter's name matches."""
    # Something to train is found, or every name is taken.
    if pattern is None or jax.tree.leaves(trained_part(model, pattern)):
        return
    paths = jax.tree_util.tree_leaves_with_path(model)
    names = [parameter_name(path) for path, _ in paths]
    raise UserError(
        f"training.train_only {pattern!r} matches no parameter: their names are such "
        f"as {names[0]} and {names[-1]}"
    )


def _left_out(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
