"""A Transformer made recursive, and a recursive model made a Transformer.

All in memory and in numpy, parameter by parameter; nothing here is differentiated.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

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
TiedNorms = Literal["average", "choice", "zero"]
"""How the norms that loops share start: the mean of the layers that share them, one
layer's, or zeros (the paper's appendix F; with one_plus norms, zeros scale by 1)."""

MAPS = {
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
    norms: TiedNorms | None = None,
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
      norms: how tied norms start; None: as the matrices do. Biases of linear maps do.
      seed: of a random block, and of the drawn A where nothing is added.

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
    # Layer by layer with plain names, so that the sharing below can pick by depth.
    layers = [layer_of(ours, base, depth) for depth in range(base.layers)]
    depths = depths_of(base.layers, stack.loops, stack.sharing)
    if norms is not None and not stack.tie_norms:
        raise UserError(
            f"norms {norms!r} is for norms that the loops share: own ones (tie_norms "
            "off) are each layer's"
        )
    if init == "random":
        sources, shared = (), _drawn_block(config, stack, seed)
    else:
        sources = source_layers(init, base.layers, stack.loops, stack.sharing)
        shared = [_mean(layers, chosen) for chosen in sources]
    for k, block in enumerate(shared):
        if norms is not None:
            sharing = depths[:, k].tolist()
            if norms == "choice":
                # A block that is one layer's already keeps that layer's norms.
                single = init not in ("average", "random")
                sharing = sources[k] if single else sharing[:1]
            chosen = _mean(layers, sharing)
            for name in block:
                if _is_norm(name):
                    block[name] = chosen[name] * (norms != "zero")
    made = {n: leaf for n, leaf in ours.items() if not n.startswith("stack.blocks.")}
    P = len(base.windows)
    for name in layers[0]:
        # A random block's norms start as a new model's, own ones too.
        by_use = not stack.tie_norms and not is_matrix(name)
        for place in range(P):
            block = range(place, stack.block_layers, P)
            # Leading axes: by loop where each use has its own, then the repeats of the
            # pattern.
            made[f"stack.blocks.{place}.{name}"] = np.stack(
                [np.stack([shared[k][name] for k in block])] * stack.loops
                if by_use and init == "random"
                else [
                    np.stack([layers[l][name] for l in row[place::P]]) for row in depths
                ]
                if by_use
                else [shared[k][name] for k in block]
            )
    if stack.rank:
        # One stream for all: places and depths draw one after another.
        draw = np.random.default_rng(seed)
        build = _AdapterBuilder(stack.rank, adapters == "svd", fused_qkv, draw)
        for place in range(P):
            # Place p of the pattern serves the layers p, p + P, ... of each loop.
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
    stack = recursive_config(model)
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
            # Depth by depth the weights that its use has, additions joined in.
            layers[depth] = use_of(ours, stack, b, k)
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
        # A wrong shape is our own mistake: the config and the arrays come from here.
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
            for name, weight in MAPS.items()
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
        # No matrix has more rank than its smaller side.
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
    # w_out reads heads, [H, E, D]: all but its last axis are inputs. The others write
    # to heads, [D, H, E].
    inputs = -1 if name.endswith("w_out") else weight.shape[0]
    outputs = weight.shape[-1] if inputs == -1 else -1
    return weight.astype(np.float64).reshape(inputs, outputs)


def layer_of(ours: Parameters, base: TransformerConfig, depth: int) -> Parameters:
    """Returns one layer's parameters by their names inside the block."""
    repeat, place = divmod(depth, len(base.windows))
    prefix = f"stack.blocks.{place}."
    return {
        name.removeprefix(prefix): leaf[repeat]
        for name, leaf in ours.items()
        if name.startswith(prefix)
    }


def use_of(
    ours: Parameters, stack: RelaxedRecursiveTransformerConfig, b: int, k: int
) -> Parameters:
    """Returns layer k of the block as its b-th use has it, additions joined in."""
    repeat, place = divmod(k, len(stack.transformer.windows))
    block, adapters = f"stack.blocks.{place}.", f"stack.adapters.{place}."
    layer = {}
    for name, leaf in ours.items():
        if name.startswith(block):
            inner = name.removeprefix(block)
            by_use = not stack.tie_norms and not is_matrix(name)
            layer[inner] = leaf[b, repeat] if by_use else leaf[repeat]
    if stack.rank:
        for name, weight in MAPS.items():
            if weight in layer:
                pair = (f"{adapters}{name}.w_{side}" for side in ("reduce", "expand"))
                reduce, expand = (ours[n][b, repeat].astype(np.float64) for n in pair)
                whole = flat(weight, layer[weight]) + reduce @ expand
                layer[weight] = whole.reshape(layer[weight].shape)
    return layer


def _mean(layers: list[Parameters], chosen: Sequence[int]) -> Parameters:
    return {name: np.mean([layers[l][name] for l in chosen], 0) for name in layers[0]}


def _drawn_block(
    config: ModelConfig, stack: RelaxedRecursiveTransformerConfig, seed: int
) -> list[Parameters]:
    """Returns the layers of a block as a new model draws them."""
    # Norms and additions apart: only the block itself is drawn.
    plain = dataclasses.replace(stack, rank=0, tie_norms=True)
    fresh = dataclasses.replace(config, stack=plain)
    draw = jax.jit(lambda key: Decoder(fresh, rngs=nnx.Rngs(key)))
    ours = parameters(draw(jax.random.key(seed)))
    return [use_of(ours, plain, 0, k) for k in range(stack.block_layers)]


def _is_norm(name: str) -> bool:
    return "_norm." in name


def is_matrix(name: str) -> bool:
    """Whether a parameter is a linear map's weight, no norm and no bias."""
    return name.rpartition(".")[2].startswith("w_")


def recursive_config(model: Decoder) -> RelaxedRecursiveTransformerConfig:
    """Returns a recursive model's stack.

    Raises:
      UserError: the model is not recursive.
    """
    stack = model.config.stack
    if not isinstance(stack, RelaxedRecursiveTransformerConfig):
        raise UserError(
            f"the model is not recursive: its stack is a {type(stack).__name__}"
        )
    return stack
