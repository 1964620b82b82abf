"""A model's parameters by name, and a model made of such, one tensor at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import parameter_name
from recurjax.sharding import shardings
from recurjax.types import Array

Parameters = dict[str, np.ndarray]


def named_leaves(model: Any) -> dict[str, Array]:
    """Returns a model's parameters by name, without moving them."""
    return {
        parameter_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }


def parameters(model: Any) -> Parameters:
    """Returns a model's parameters by name, all of them on the host."""
    return {name: np.asarray(leaf) for name, leaf in named_leaves(model).items()}


def on_host(leaf: Array) -> np.ndarray:
    """Returns an array's numbers, gathered from its devices.

    The array keeps no copy of them, as one that NumPy reads from several devices would.
    """
    if not leaf.is_fully_replicated:
        mesh = leaf.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
        leaf = jax.device_put(leaf, NamedSharding(mesh, P()))
    return np.asarray(leaf.addressable_shards[0].data)


def stacked(count: int, make: Callable[[int], np.ndarray]) -> np.ndarray:
    """Stacks what a function makes of 0 .. count - 1, one after another.

    A list of them all and their stack would be twice as much.
    """
    first = make(0)
    stacked = np.empty((count, *first.shape), first.dtype)
    stacked[0] = first
    for index in range(1, count):
        stacked[index] = make(index)
    return stacked


def with_parameters(
    config: ModelConfig, parameters: Parameters, *, mesh: Mesh | None = None
) -> Decoder:
    """Makes the model of a config that has exactly these parameters."""
    parameters = dict(parameters)
    model = made_by(config, lambda name: parameters.pop(name).copy(), mesh=mesh)
    assert not parameters, sorted(parameters)
    return model


def made_by(
    config: ModelConfig,
    make: Callable[[str], np.ndarray | Array],
    *,
    mesh: Mesh | None = None,
) -> Decoder:
    """Makes the model of a config whose parameters a function makes, one at a time.

    Args:
      make: gets a parameter's name, each name once. A NumPy array that it returns is
        the model's from then on, one of JAX is copied.
      mesh: where they are laid out; None: on one device.
    """
    like = jax.eval_shape(
        lambda key: Decoder(config, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    places = like if mesh is None else shardings(like, mesh)

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, where: Any) -> Any:
        value = make(parameter_name(path))
        # A wrong shape is our own mistake: the config and the arrays come from here.
        assert value.shape == leaf.shape, (parameter_name(path), value.shape)
        # Copying continues in the background and could hold several tensors at a time.
        return jax.block_until_ready(_placed(value, leaf, where))

    return jax.tree_util.tree_map_with_path(fill, like, places)


def _placed(value: np.ndarray | Array, leaf: jax.ShapeDtypeStruct, where: Any) -> Array:
    """Returns a parameter with a sharding; None: on one device."""
    # Shared, a parameter would go from both models where one of them is donated.
    held = isinstance(value, jax.Array)
    if not isinstance(where, NamedSharding):
        return (jnp.array if held else jnp.asarray)(value, leaf.dtype)
    value = value.astype(leaf.dtype)
    if held:
        return jax.device_put(value, where, may_alias=False)
    return jax.make_array_from_callback(value.shape, where, lambda i: value[i])
