"""RAT's pattern with the latent memory of the Latent Recurrent Transformer.

x_l <- x_l + gamma_l m at the input of layer l, with m the normed state that a layer
further up left for an earlier token. Not from a paper.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Float, Int

from recurjax.layers.mesh import SEQUENCE_AXIS
from recurjax.layers.stack import PatternCache, advanced, scan_pattern
from recurjax.types import Array, Cache, Tokens
from recurjax.variants.latent_recurrent_transformer.memory_stack import (
    MemoryStack,
    PassOutput,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    Positions,
    indices,
    rms,
)
from recurjax.variants.rat.config import RatConfig
from recurjax.variants.rat.stack import RatStack


class MemoryPatternCache(NamedTuple):
    """A pattern's cache, and the last states of each row, newest first."""

    position: Int[Array, " B"]
    groups: tuple[Cache, ...]
    states: Float[Array, "B N D"]

    @property
    def pattern(self) -> PatternCache:
        """The cache without the states."""
        return PatternCache(self.position, self.groups)


class MemoryRatStack(MemoryStack, RatStack):
    """L blocks of a pattern, whose tokens receive states of earlier ones.

    Called as every stack it is the exact recurrence, one token after another. `initial`
    and `refine` are what training in parallel is made of: a pass over all positions
    with a memory of zero, and one with the states that it left.
    """

    def __init__(self, config: RatConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.add_logits()

    def init_cache(self, batch: int, length: int, dtype) -> MemoryPatternCache:
        """Creates the cache for `length` tokens per row; 0 is the training cache.

        Args:
          dtype: dtype of keys, values and the memory's states.
        """
        assert self.config.memory is not None
        empty = super().init_cache(batch, length, dtype)
        states = jnp.zeros((batch, self.config.memory.depth, self.config.width), dtype)
        return MemoryPatternCache(empty.position, empty.groups, states)

    def refuses(self, mesh: Mesh | AbstractMesh, length: int) -> str | None:
        """Returns why rows of `length` tokens cannot train on a mesh, or None."""
        if mesh.shape[SEQUENCE_AXIS] > 1:
            return (
                "mesh.sequence cannot cut rows whose tokens receive states of earlier "
                "ones: leave out model.stack.memory, or use mesh.data and mesh.fsdp"
            )
        return super().refuses(mesh, length)

    def __call__(
        self, x: Float[Array, "B T D"], cache: MemoryPatternCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], MemoryPatternCache]:
        training = cache.pattern.training
        y, working = self.exact(x, None if training else cache, tokens)
        return y, cache if training else working

    def initial(
        self, x: Float[Array, "B T D"], tokens: Tokens, *, origins: bool = False
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Runs all positions at once with a memory of zero: the initialization pass.

        Returns:
          The last layer's output, and the states that later tokens receive.
        """
        del origins  # there are no keys that a memory could enter later
        out = self._over_all(x, None, tokens)
        return out.x, out.state

    def refine(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        positions: Positions,
        buffer: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Recomputes all positions, on the states that the pass before has left.

        Args:
          positions: all of them: a mixer's state comes from the tokens before it.
          buffer: these states.

        Raises:
          ValueError: the positions are not all.
        """
        if len(indices(positions, x.shape[1])) < x.shape[1]:
            raise ValueError(
                "refine: a stack of mixers runs all positions at once, not "
                f"{positions}: use one subset"
            )
        out = self._over_all(x, self.memory_of(buffer, tokens), tokens)
        return out.x, out.state

    def layer_states(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yields what enters the first layer, and what leaves each.

        All positions run at once, on the memory that the exact recurrence gives them.
        """
        yield x
        memory = self.exact_memory(x, tokens)
        every = frozenset(range(len(self.blocks)))
        _, _, outs = self._run(x, memory, self._training(x), tokens, keep=every)
        for repeat in range(self.config.layers // len(self.blocks)):
            for of_place in outs:
                yield of_place[repeat]

    def pass_on_cache(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B T D"] | None,
        cache: MemoryPatternCache,
        tokens: Tokens,
    ) -> PassOutput:
        """Runs T more tokens of every row after the cached ones."""
        return self._pass(x, memory, cache.pattern, tokens)

    def after(
        self, cache: MemoryPatternCache, out: PassOutput, tokens: Tokens, states: Array
    ) -> MemoryPatternCache:
        """Returns a cache after a pass: see `MemoryStack.after`."""
        new = advanced(cache.pattern, out.stores, out.x.shape[1], tokens)
        states = self.kept(cache, states, tokens)
        return MemoryPatternCache(new.position, new.groups, states)

    def _training(self, x: Array) -> PatternCache:
        return self.init_cache(x.shape[0], 0, x.dtype).pattern

    def _over_all(self, x: Array, memory: Array | None, tokens: Tokens) -> PassOutput:
        return self._pass(x, memory, self._training(x), tokens)

    def _pass(
        self, x: Array, memory: Array | None, cache: PatternCache, tokens: Tokens
    ) -> PassOutput:
        config = self.config
        assert config.memory is not None
        weights, places = self.source_weights(x.dtype), len(self.blocks)
        sources = [] if weights is None else [n - 1 for n in config.memory.sources]
        keep = frozenset(layer % places for layer in sources)
        y, written, outs = self._run(x, memory, cache, tokens, keep=keep)
        state = y
        if weights is not None:
            state = jnp.zeros_like(y)
            for layer in sources:
                state += weights[layer] * outs[layer % places][layer // places]
        if config.memory.normed:
            state = rms(state)
        return PassOutput(y, state, written)

    def _run(
        self,
        x: Array,
        memory: Array | None,
        cache: PatternCache,
        tokens: Tokens,
        *,
        keep: frozenset[int],
    ) -> tuple[Array, tuple[Cache, ...], tuple[Any, ...]]:
        """Runs all layers; returns the outputs of those of the kept places, too."""

        def apply(number: int, block: Any, x: Array, group: Cache):
            if memory is not None:
                x = x + block.memory_scale[...].astype(x.dtype) * memory
            x, group = block(x, group, tokens)
            return x, group, x if number in keep else None

        repeats = self.config.layers // len(self.blocks)
        return scan_pattern(
            apply,
            x,
            cache.groups,
            tuple(self.blocks),
            jnp.arange(repeats, dtype=jnp.int32),
            position=cache.position,
            remat=self.config.remat,
            unroll=self.config.unroll,
            cached=not cache.training,
        )
