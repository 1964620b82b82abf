"""The Recurrent Transformer stack: one op over all layers."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Float

from pallas_kernels.recurrent_prefill import (
    RecurrentCache,
    Rows,
    empty_cache,
    recurrent_prefill,
)
from recurjax.layers.mesh import STAGE_AXIS, refuse_sequence
from recurjax.layers.position import (
    check_cache_length,
    learned_positions,
    with_positions,
)
from recurjax.layers.stack import CacheRows
from recurjax.types import Array, Tokens
from recurjax.variants.recurrent_transformer.block import (
    RecurrentTransformerBlock,
    run_layers,
    spec_of,
    weights_of,
)
from recurjax.variants.recurrent_transformer.config import RecurrentTransformerConfig


class RecurrentTransformerStack(CacheRows, nnx.Module):
    """L layers; `blocks` stacks their weights on a leading axis."""

    def __init__(self, config: RecurrentTransformerConfig, *, rngs: nnx.Rngs):
        self.config = config

        def block(key: Array, layer: Array) -> RecurrentTransformerBlock:
            rngs = nnx.Rngs(params=key)
            return RecurrentTransformerBlock(config, layer=layer, rngs=rngs)

        # One traced init for all layers: a deep stack takes no longer to compile.
        keys = jax.random.split(rngs.params(), config.layers)
        self.blocks = jax.vmap(block)(keys, jnp.arange(config.layers))
        self.position = learned_positions(
            config.position, config.width, config.init, rngs=rngs
        )

    def init_cache(self, batch: int, length: int, dtype) -> RecurrentCache:
        """Creates the cache for `length` tokens per row.

        Args:
          length: 0 for the training cache, which keeps nothing.
          dtype: dtype of keys and values.

        Raises:
          ValueError: learned positions end before `length`.
        """
        name = type(self).__name__
        check_cache_length(name, length, self.config.max_length)
        # The op's own cache: persistent pairs, and the running block's temporary ones.
        spec = spec_of(self.config, jnp.dtype(dtype).name)
        sizes = (self.config.layers, batch, length, self.config.width)
        return empty_cache(*sizes, spec)

    def refuses(self, mesh: Mesh | AbstractMesh, length: int) -> str | None:
        """Returns why it cannot train on a mesh, or None.

        Only the wavefront cuts the layers into stages, each device as many of them.
        """
        config, stages = self.config, mesh.shape[STAGE_AXIS]
        if stages > 1 and config.schedule != "wavefront":
            return (
                "mesh.stage is for the wavefront over layers: set "
                "--model.stack.schedule wavefront or leave it at 1, got "
                f"{stages} stages and schedule {config.schedule}"
            )
        if config.layers % stages:
            return (
                f"mesh.stage must divide the model's {config.layers} layers, got "
                f"{stages}"
            )
        return refuse_sequence(mesh, type(config).__name__)

    def __call__(
        self, x: Float[Array, "B T D"], cache: RecurrentCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], RecurrentCache]:
        """Runs T more positions of every row; the residual stream is at least float32.

        Raises:
          NotImplementedError: segments with a real cache.
        """
        x = self._placed(x, cache)
        return run_layers(self.config, self.blocks, x, cache, tokens)

    def layer_states(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yields what enters the first layer, and what leaves each."""
        dtype, spec = x.dtype, spec_of(self.config, x.dtype.name)
        # One layer a call, compiled once: the layers have equal shapes.
        run = jax.jit(partial(recurrent_prefill, spec=spec))
        weights, (B, _, D) = weights_of(self.blocks), x.shape
        cache = empty_cache(1, B, 0, D, spec)
        rows = Rows(lengths=tokens.lengths, segments=tokens.segments)
        x = self._placed(x, cache)
        yield x
        for layer in range(self.config.layers):
            layer_weights = jax.tree.map(lambda w, at=layer: w[at : at + 1], weights)
            wide = x.astype(jnp.promote_types(dtype, jnp.float32))
            x = run(wide, layer_weights, cache, rows=rows)[0].astype(dtype)
            yield x

    def _placed(self, x: Array, cache: RecurrentCache) -> Array:
        """Adds the learned positions, if there are any."""
        training = cache.slots == 0
        return with_positions(x, self.position, cache.position, training=training)
