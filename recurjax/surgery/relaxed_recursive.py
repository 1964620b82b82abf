"""A Transformer made recursive, a recursive model made a Transformer, or cut shorter.

All in memory and in numpy, parameter by parameter; nothing here is differentiated.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recurjax.errors import UserError
from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import parameter_name
from recurjax.surgery.low_rank import Factors, low_rank_factors
from recurjax.surgery.shared_block import BlockInit, source_layers
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.relaxed_recursive_transformer.sharing import depths_of
from recurjax.variants.transformer import TransformerConfig

Parameters = dict[str, np.ndarray]

_MAPS = {
    "q": "attention.w_q",
    "k": "attention.w_k",
    "v": "attention.w_v",
    "out": "attention.w_out",
    "up": "mlp.w_up",
    "gate": "mlp.w_gate",
    "down": "mlp.w_down",
}
"""Our name of the weight that each adapter adds to."""


def to_recursive(
    model: Decoder,
    stack: RelaxedRecursiveTransformerConfig,
    *,
    init: BlockInit,
    adapters: Literal["svd", "zero"] = "svd",
    fused_qkv: bool = False,
    seed: int = 0,
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
      seed: of the drawn A where nothing is added.

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
    config = dataclasses.replace(model.config, stack=stack)
    ours = parameters(model)
    layers = [_layer(ours, base, depth) for depth in range(base.layers)]
    sources = source_layers(init, base.layers, stack.loops, stack.sharing)
    shared = [
        {name: np.mean([layers[l][name] for l in chosen], 0) for name in layers[0]}
        for chosen in sources
    ]
    depths = depths_of(base.layers, stack.loops, stack.sharing)
    made = {n: leaf for n, leaf in ours.items() if not n.startswith("stack.blocks.")}
    P = len(base.windows)
    for name in layers[0]:
        by_use = not stack.tie_norms and not _is_matrix(name)
        for place in range(P):
            block = range(place, stack.block_layers, P)
            made[f"stack.blocks.{place}.{name}"] = np.stack(
                [np.stack([layers[l][name] for l in row[place::P]]) for row in depths]
                if by_use
                else [shared[k][name] for k in block]
            )
    if stack.rank:
        draw = np.random.default_rng(seed)
        build = _AdapterBuilder(stack.rank, adapters == "svd", fused_qkv, draw)
        for place in range(P):
            uses = [
                [build(layers[l], shared[k]) for k, l in list(enumerate(row))[place::P]]
                for row in depths
            ]
            for name in uses[0][0]:
                leaf = np.stack([np.stack([use[name] for use in row]) for row in uses])
                made[f"stack.adapters.{place}.{name}"] = leaf
    return with_parameters(config, made)


def to_transformer(model: Decoder) -> Decoder:
    """Writes a recursive model out: an ordinary Transformer of L layers that is equal.

    Each depth's matrices are W + A B, multiplied in float64.

    Raises:
      UserError: the model is not recursive, or its deeper loops read loop 1's keys and
        values, which no Transformer does.
    """
    stack = _recursive(model)
    if stack.loop_cache == "first" and stack.loops > 1:
        raise UserError(
            "a model with loop_cache 'first' is no Transformer: its deeper loops have "
            "no keys and values of their own"
        )
    base, ours = stack.transformer, parameters(model)
    P, L = len(base.windows), base.layers
    layers: list[Parameters] = [{} for _ in range(L)]
    depths = depths_of(L, stack.loops, stack.sharing)
    for b, row in enumerate(depths):
        for k, depth in enumerate(row):
            layers[depth] = _use(ours, stack, b, k)
    made = {
        name: leaf
        for name, leaf in ours.items()
        if not name.startswith(("stack.blocks.", "stack.adapters."))
    }
    for name in layers[0]:
        for place in range(P):
            leaves = [layer[name] for layer in layers[place::P]]
            made[f"stack.blocks.{place}.{name}"] = np.stack(leaves)
    return with_parameters(dataclasses.replace(model.config, stack=base), made)


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


class Energy(NamedTuple):
    """How far one depth's matrix lies from the shared one, and what is made up for.

    Attributes:
      depth: of the layer, from 0.
      name: q, k, v, out, up, gate or down.
      residual: Frobenius norm of W_l - W'.
      kept: share of its square that the addition has; 1 where there is no residual.
    """

    depth: int
    name: str
    residual: float
    kept: float


def kept_energy(model: Decoder, recursive: Decoder) -> list[Energy]:
    """Compares a recursive model with the Transformer that it was made of.

    What is left over is ||W_l - W' - A B||^2, so kept = 1 - left / ||W_l - W'||^2; an
    addition of low rank by singular values can only keep, one not trained for it may
    also lose.
    """
    stack, base = _recursive(recursive), model.config.stack
    assert isinstance(base, TransformerConfig)
    ours, theirs = parameters(recursive), parameters(model)
    bare = {n: leaf for n, leaf in ours.items() if not n.startswith("stack.adapters.")}
    plain = dataclasses.replace(stack, rank=0)
    found = []
    for b, row in enumerate(depths_of(base.layers, stack.loops, stack.sharing)):
        for k, depth in enumerate(row):
            wanted = _layer(theirs, base, int(depth))
            shared, joined = _use(bare, plain, b, k), _use(ours, stack, b, k)
            for name, weight in _MAPS.items():
                if weight not in wanted:
                    continue
                whole = wanted[weight].astype(np.float64)
                before = float(np.sum((whole - shared[weight]) ** 2))
                left = float(np.sum((whole - joined[weight]) ** 2))
                kept = 1.0 - left / before if before else 1.0
                found.append(Energy(int(depth), name, before**0.5, kept))
    return sorted(found, key=lambda energy: energy.depth)


def plot_energy(energies: list[Energy], file: Path) -> None:
    """Draws the kept share of each matrix' residual, depths down, matrices across."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(energy.name for energy in energies))
    depths = 1 + max(energy.depth for energy in energies)
    shares = np.full((depths, len(names)), np.nan)
    for energy in energies:
        shares[energy.depth, names.index(energy.name)] = energy.kept
    figure = Figure(figsize=(1.8 + 0.6 * len(names), 1.2 + 0.26 * depths))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="depth", title="kept share of the residual")
    figure.colorbar(image)
    figure.savefig(file, dpi=120)


def truncated(model: Decoder, loops: int) -> Decoder:
    """Returns the model of the first loops: what an exit after them computes.

    Raises:
      UserError: the model is not recursive, has fewer loops, shares otherwise than by
        "cycle", or scales its branches by its depth.
    """
    stack = _recursive(model)
    if not 1 <= loops <= stack.loops:
        raise UserError(f"loops must lie in 1..{stack.loops}, got {loops}")
    if loops == stack.loops:
        return model
    if stack.sharing != "cycle":
        raise UserError(
            f"only with sharing 'cycle' can loops be left out, not {stack.sharing!r}"
        )
    base = stack.transformer
    if base.residual_scale != "one":
        raise UserError(
            "loops cannot be left out of a model whose residual_scale depends on its "
            f"depth: {base.residual_scale!r}"
        )
    shorter = dataclasses.replace(base, layers=loops * stack.block_layers)
    cut = dataclasses.replace(stack, transformer=shorter, loops=loops)

    def leaf_of(name: str, leaf: np.ndarray) -> np.ndarray:
        own = name.startswith("stack.adapters.")
        untied = name.startswith("stack.blocks.") and not _is_matrix(name)
        by_loop = own or (untied and not stack.tie_norms)
        return leaf[:loops] if by_loop else leaf

    made = {name: leaf_of(name, leaf) for name, leaf in parameters(model).items()}
    return with_parameters(dataclasses.replace(model.config, stack=cut), made)


def parameters(model: Decoder) -> Parameters:
    """Returns a model's parameters by name."""
    return {
        parameter_name(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }


def with_parameters(config: ModelConfig, made: Parameters) -> Decoder:
    """Makes the model of a config that has exactly these parameters."""
    like = jax.eval_shape(
        lambda key: Decoder(config, rngs=nnx.Rngs(key)), jax.random.key(0)
    )

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        value = made.pop(parameter_name(path))
        assert value.shape == leaf.shape, (parameter_name(path), value.shape)
        return jnp.asarray(value, leaf.dtype)

    made = dict(made)
    filled = jax.tree_util.tree_map_with_path(fill, like)
    assert not made, sorted(made)
    return filled


class _AdapterBuilder:
    """Makes one depth's adapters from its layer and the block's."""

    def __init__(self, rank: int, svd: bool, fused: bool, draw: np.random.Generator):
        self.rank, self.svd, self.fused, self.draw = rank, svd, fused, draw

    def __call__(self, layer: Parameters, shared: Parameters) -> Parameters:
        residuals = {
            name: flat(weight, layer[weight]) - flat(weight, shared[weight])
            for name, weight in _MAPS.items()
            if weight in layer
        }
        factors: dict[str, Factors] = {}
        if self.fused:
            factors = self._side_by_side(residuals, ("q", "k", "v"))
        factors |= {
            name: self._factors(residual)
            for name, residual in residuals.items()
            if name not in factors
        }
        made = {}
        for name, (reduce, expand) in factors.items():
            made[f"{name}.w_reduce"], made[f"{name}.w_expand"] = reduce, expand
        return made

    def _factors(self, residual: np.ndarray) -> Factors:
        rank = min(self.rank, *residual.shape)
        if self.svd and residual.any():
            return low_rank_factors(residual, rank)
        # Nothing to add: a drawn A, so that B = 0 still has a gradient.
        inputs, outputs = residual.shape
        reduce = self.draw.normal(scale=inputs**-0.5, size=(inputs, rank))
        return Factors(reduce, np.zeros((rank, outputs)))

    def _side_by_side(
        self, residuals: Parameters, names: tuple[str, ...]
    ) -> dict[str, Factors]:
        widths = [residuals[name].shape[1] for name in names]
        if len({min(self.rank, *residuals[name].shape) for name in names}) > 1:
            raise UserError(
                f"q, k and v cannot share factors of rank {self.rank}, which is more "
                "than one of them has: lower the rank or leave fused_qkv off"
            )
        reduce, expand = self._factors(
            np.concatenate([residuals[name] for name in names], axis=1)
        )
        cuts = np.split(expand, np.cumsum(widths)[:-1], axis=1)
        return {
            name: Factors(reduce, cut) for name, cut in zip(names, cuts, strict=True)
        }


def flat(name: str, weight: np.ndarray) -> np.ndarray:
    """Returns a weight as the matrix [N, M] of its product, in float64."""
    inputs = -1 if name.endswith("w_out") else weight.shape[0]
    outputs = weight.shape[-1] if inputs == -1 else -1
    return weight.astype(np.float64).reshape(inputs, outputs)


def _layer(ours: Parameters, base: TransformerConfig, depth: int) -> Parameters:
    """Returns one layer's parameters by their names inside the block."""
    repeat, place = divmod(depth, len(base.windows))
    prefix = f"stack.blocks.{place}."
    return {
        name.removeprefix(prefix): leaf[repeat]
        for name, leaf in ours.items()
        if name.startswith(prefix)
    }


def _use(
    ours: Parameters, stack: RelaxedRecursiveTransformerConfig, b: int, k: int
) -> Parameters:
    """Returns layer k of the block as its b-th use has it, additions joined in."""
    repeat, place = divmod(k, len(stack.transformer.windows))
    block, adapters = f"stack.blocks.{place}.", f"stack.adapters.{place}."
    layer = {}
    for name, leaf in ours.items():
        if name.startswith(block):
            inner = name.removeprefix(block)
            by_use = not stack.tie_norms and not _is_matrix(name)
            layer[inner] = leaf[b, repeat] if by_use else leaf[repeat]
    if stack.rank:
        for name, weight in _MAPS.items():
            if weight in layer:
                pair = (f"{adapters}{name}.w_{side}" for side in ("reduce", "expand"))
                reduce, expand = (ours[n][b, repeat].astype(np.float64) for n in pair)
                whole = flat(weight, layer[weight]) + reduce @ expand
                layer[weight] = whole.reshape(layer[weight].shape)
    return layer


def _is_matrix(name: str) -> bool:
    return name.rpartition(".")[2].startswith("w_")


def _recursive(model: Decoder) -> RelaxedRecursiveTransformerConfig:
    stack = model.config.stack
    if not isinstance(stack, RelaxedRecursiveTransformerConfig):
        raise UserError(
            f"the model is not recursive: its stack is a {type(stack).__name__}"
        )
    return stack
