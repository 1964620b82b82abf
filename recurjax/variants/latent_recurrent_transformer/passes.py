"""One pass over some positions: what every schedule of the recurrence is made of.

A pass takes embeddings, a memory that enters each token, and the place where keys and
values come from: the pass itself (all positions at once), a buffer of a whole sequence
some of whose positions are computed anew, or a cache. It knows nothing of where the
memory came from; that is the schedules' matter, in `stack`.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.layers.stack import layers_a_turn, make_blocks, scan_layers
from recurjax.types import Array, Tokens
from recurjax.variants.latent_recurrent_transformer.block import (
    LatentBlock,
    MemoryProjection,
    Pass,
    Stream,
)
from recurjax.variants.latent_recurrent_transformer.caches import (
    LatentBuffer,
    LatentCache,
    Output,
)
from recurjax.variants.latent_recurrent_transformer.config import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.latent_recurrent_transformer.places import (
    Buffer,
    Place,
    Whole,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    Memory,
    Positions,
    indices,
    rms,
    take,
)


class LatentPasses(nnx.Module):
    """L blocks; `blocks[p]` stacks the layers p, p + P, p + 2P, ... of a P-pattern."""

    def __init__(self, config: LatentRecurrentTransformerConfig, *, rngs: nnx.Rngs):
        self.config = config

        def block(place: int, layer: Array, rngs: nnx.Rngs) -> LatentBlock:
            return LatentBlock(config, place=place, layer=layer, rngs=rngs)

        self.blocks = nnx.List(
            make_blocks(block, layers=config.layers, pattern=config.pattern, rngs=rngs)
        )
        memory, projection, lags, sources = config.memory, None, 0, 0
        if memory is not None:
            if memory.gated and memory.projection == "shared":
                projection = MemoryProjection(config, rngs=rngs)
            # Learned averages have one logit a lag or source; of one alone there is
            # nothing to learn.
            lags = len(memory.lags) if memory.combine == "average" else 0
            sources = len(memory.sources)
        # With one lag or source a softmax of one logit would always be 1.
        logits = lambda n: nnx.Param(jnp.zeros(n)) if n > 1 else None  # noqa: E731
        self.memory = projection
        self.lag_logits, self.source_logits = logits(lags), logits(sources)

    def pass_over_all(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        *,
        kept: bool,
        origins: bool = False,
    ) -> Output:
        """Runs all positions with a memory of zero.

        Args:
          kept: whether to hand on keys and values, as a buffer's.
          origins: what they were made of too.
        """
        seen = Pass(
            x0=rms(x),
            ids=tokens.ids,
            memory=None,
            position=jnp.arange(x.shape[1])[None],
            segments=tokens.segments,
        )
        return self._run(seen, Whole(kept, origins))

    def pass_at_positions(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        positions: Positions,
        buffer: LatentBuffer,
        memory: Float[Array, "B n D"],
    ) -> Output:
        """Runs the n chosen positions on the others' buffered keys and values."""
        T = x.shape[1]
        seen = Pass(
            # Only the chosen positions are computed; the others lend their keys and
            # values.
            x0=rms(take(x, positions)),
            ids=take(tokens.ids, positions),
            # Without a memory the projections would give zeros: they are left out.
            memory=self._projected(memory),
            position=jnp.asarray(indices(positions, T), jnp.int32)[None],
            positions=positions,
            segments=tokens.segments,
        )
        return self._run(seen, buffer.groups)

    def pass_on_cache(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B T D"] | None,
        cache: LatentCache,
        tokens: Tokens,
    ) -> Output:
        """Runs T more tokens of every row behind the cached ones.

        Args:
          memory: what enters them; None: zero.
        """
        if tokens.segments is not None:
            raise NotImplementedError(
                "LatentRecurrentTransformerStack: segments are for the training cache "
                "(length 0) only"
            )
        seen = Pass(
            x0=rms(x),
            ids=tokens.ids,
            memory=None if memory is None else self._projected(memory),
            position=cache.position[:, None] + jnp.arange(x.shape[1]),
            lengths=tokens.lengths,
        )
        # The rows' positions are kept once for all layers; each layer's cache is told
        # them.
        groups = tuple(g._replace(position=cache.position) for g in cache.groups)
        return self._run(seen, groups)

    def states_on_memory(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B T D"] | None,
        tokens: Tokens,
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yields what leaves each layer, all positions at once, one layer a call.

        Args:
          memory: what enters them; None: zero.
        """
        seen = Pass(
            x0=rms(x),
            ids=tokens.ids,
            memory=None if memory is None else self._projected(memory),
            position=jnp.arange(x.shape[1])[None],
            segments=tokens.segments,
        )

        @jax.jit
        def run(block, stream, layer):
            return block(stream, seen, Whole(kept=False), layer)[0]

        stream = self._stream(seen.x0)
        for layer in range(self.config.layers):
            repeat, place = divmod(layer, self.config.pattern)
            # One layer's own weights, taken from the stack of its place in the pattern.
            own = jax.tree.map(lambda w, at=repeat: w[at], self.blocks[place])
            stream = run(own, stream, jnp.int32(layer))
            yield stream.x

    def _projected(self, state: Array) -> Memory:
        memory = Memory(state)
        return memory if self.memory is None else self.memory(memory)

    def _run(self, seen: Pass, places: Whole | tuple) -> Output:
        """Runs all layers; `places` has one place for each in the pattern."""
        config = self.config
        P = config.pattern
        # In a pass over everything nothing comes before, so no place has to be carried.
        whole = isinstance(places, Whole)
        # A buffer goes through the scan layer by layer and comes back renewed; a cache
        # is carried whole, so that a step updates it in place.
        buffers = places if not whole and isinstance(places[0], Buffer) else ()
        caches = () if whole or buffers else places
        weights = self._source_weights(seen.x0.dtype)
        stream = self._stream(seen.x0)

        def repeat(carry, turn):
            stream, state, caches = carry
            blocks, buffers, number = turn
            # One turn runs the P layers of the pattern.
            kept, written = [], []
            for p, block in enumerate(blocks):
                layer = number * P + p
                place: Place
                if isinstance(places, Whole):
                    place = places
                elif buffers:
                    place = buffers[p]
                else:
                    place = caches[p]._replace(layer=number)
                stream, place = block(stream, seen, place, layer)
                (written if caches else kept).append(place)
                if weights is not None:
                    # The state is a learned mix of several layers' outputs, summed as
                    # they are made.
                    state = state + weights[layer] * stream.x
            return (stream, state, tuple(written)), tuple(kept)

        # Summed from zero as layers go by; only the shares of the sources are not zero.
        zero = None if weights is None else jnp.zeros_like(seen.x0)
        repeats = config.layers // P
        (stream, state, caches), kept = scan_layers(
            repeat,
            (stream, zero, caches),
            (tuple(self.blocks), buffers, jnp.arange(repeats, dtype=jnp.int32)),
            remat=config.remat,
            unroll=layers_a_turn(seen.x0, config.unroll, repeats, cached=bool(caches)),
            cached=bool(caches),
        )
        # Without shares the state is the last layer's output.
        state = stream.x if state is None else state
        if config.memory is not None and config.memory.normed:
            state = rms(state)
        return Output(stream.x, state, caches or kept)

    def _stream(self, x0: Array) -> Stream:
        config = self.config
        B, n, D = x0.shape
        values, history = None, None
        if config.value_residual == "first":
            # Layer 0 writes its values here, and the later layers read them.
            shape = (B, n, config.key_heads, config.head_width)
            values = jnp.zeros(shape, x0.dtype)
        if config.input_mixing == "dense":
            history = jnp.zeros((config.layers, B, n, D), x0.dtype)
        return Stream(x0, values, history)

    def _source_weights(self, dtype) -> Array | None:
        """Returns each layer's share of the state; None: it is the last layer's."""
        memory, L = self.config.memory, self.config.layers
        if memory is None or memory.sources == (L,):
            return None
        # Sources count layers from 1.
        layers = jnp.asarray(memory.sources) - 1
        shares = jnp.ones(1, dtype)
        if self.source_logits is not None:
            shares = jax.nn.softmax(self.source_logits[...]).astype(dtype)
        return jnp.zeros(L, dtype).at[layers].set(shares)
