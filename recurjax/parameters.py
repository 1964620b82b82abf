"""A module's parameters as a nested dict with string keys, and back.

Checkpoints, converters and the sharding table know parameters by these names only, for
example `stack/blocks/0/attention/w_q`; none of them knows flax.
"""

from typing import Any, TypeVar

import jax

Module = TypeVar("Module")


def parameter_name(path: tuple[Any, ...]) -> str:
    """Returns a leaf's name, such as `stack.blocks.0.attention.w_q`, from its key path.

    Works for a module's own leaves and for trees that contain modules, such as an
    optimizer state: `1.mu.stack.blocks.0.attention.w_q`.
    """
    return ".".join(_names(path))


def to_nested_dict(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a module, or a tree of modules, as nested dicts."""
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, last = _names(path)
        inner = nested
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return nested


def from_nested_dict(like: Module, nested: dict[str, Any]) -> Module:
    """Returns `like` with its leaves taken from `nested`, as `to_nested_dict` made it.

    Args:
      like: gives the structure; its leaves may be abstract.
      nested: one leaf for each of `like`'s, neither more nor fewer.

    Raises:
      ValueError: names or shapes differ; all differences are listed.
    """
    given = {
        parameter_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(nested)
    }
    wanted, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves, differences = [], []
    for path, leaf in wanted:
        name = parameter_name(path)
        value = given.pop(name, None)
        if value is None:
            differences.append(f"{name} is missing")
        elif value.shape != leaf.shape:
            differences.append(f"{name} has shape {value.shape}, not {leaf.shape}")
        leaves.append(value)
    differences += [f"{name} is not a parameter of the model" for name in given]
    if differences:
        raise ValueError("from_nested_dict: " + "; ".join(differences))
    return jax.tree_util.tree_unflatten(structure, leaves)


def _names(path: tuple[Any, ...]) -> list[str]:
    """Names of a key path; a Param's own `value` step is left out."""
    keys = list(path)
    attribute = jax.tree_util.GetAttrKey
    if len(keys) > 1 and isinstance(keys[-1], attribute) and keys[-1].name == "value":
        keys.pop()
    return [jax.tree_util.keystr((key,), simple=True) for key in keys]
