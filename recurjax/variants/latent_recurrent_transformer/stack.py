"""The stack: one pass over some positions, of which every schedule is made."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from recurjax.layers.key_value_cache import empty_key_value_cache
from recurjax.layers.layer_scan import scan_layers
from recurjax.layers.mesh_axes import UncutStack
from recurjax.layers.pattern_stack import make_blocks
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
from recurjax.variants.latent_recurrent_transformer.lags import (
    entering,
    forgotten,
    mixed_lags,
    newest,
)
from recurjax.variants.latent_recurrent_transformer.places import (
    Buffer,
    Place,
    Whole,
    slots_of,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    Memory,
    Positions,
    indices,
    put,
    rms,
    take,
)


class LatentRecurrentTransformerStack(UncutStack):
    """L blocks; `blocks[p]` stacks the layers p, p + P, p + 2P, ... of a P-pattern.

    Called as every stack it is the exact recurrence, one token after another (without a
    memory: all at once). `initial` and `refine` are what training is made of.
    """

    def __init__(self, config: LatentRecurrentTransformerConfig, *, rngs: nnx.Rngs):
        self.config = config

        def block(place: int, layer: Array, rngs: nnx.Rngs) -> LatentBlock:
            return LatentBlock(config, place=place, layer=layer, rngs=rngs)

        layers, P = config.layers, config.pattern
        self.blocks = nnx.List(make_blocks(block, layers=layers, pattern=P, rngs=rngs))
        memory, projection, lags, sources = config.memory, None, 0, 0
        if memory is not None:
            if memory.gated and memory.projection == "shared":
                projection = MemoryProjection(config, rngs=rngs)
            lags = len(memory.lags) if memory.combine == "average" else 0
            sources = len(memory.sources)
        logits = lambda n: nnx.Param(jnp.zeros(n)) if n > 1 else None  # noqa: E731
        self.memory = projection
        self.lag_logits, self.source_logits = logits(lags), logits(sources)

    def init_cache(self, batch: int, length: int, dtype) -> LatentCache:
        """Makes the cache for `length` tokens a row; 0 is the training cache.

        Args:
          dtype: of keys and values; the states have it too.
        """
        config = self.config
        repeats = config.layers // config.pattern
        groups = tuple(
            empty_key_value_cache(
                repeats,
                batch,
                slots_of(window, length),
                config.key_heads,
                config.head_width,
                dtype,
            )
            for window in config.layer_windows[: config.pattern]
        )
        depth = 0 if config.memory is None else config.memory.depth
        return LatentCache(
            position=jnp.zeros(batch, jnp.int32),
            groups=groups,
            states=jnp.zeros((batch, depth, config.width), dtype),
        )

    def __call__(
        self, x: Float[Array, "B T D"], cache: LatentCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], LatentCache]:
        training = all(group.slots == 0 for group in cache.groups)
        B, T, _ = x.shape
        if self.config.memory is None:
            if training:
                return self._whole(x, tokens, kept=False).x, cache
            return self._on_cache(x, None, cache, tokens)
        if tokens.segments is not None:
            raise NotImplementedError(
                "LatentRecurrentTransformerStack: the exact recurrence takes no "
                "segments; use memory.reset_token"
            )
        own = self.init_cache(B, T, x.dtype) if training else cache
        if T == 1:
            y, own = self._token(x, own, tokens)
        else:
            y, own = self._one_after_another(x, own, tokens)
        return y, cache if training else own

    def initial(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], LatentBuffer]:
        """Runs all positions at once with a memory of zero: the initialization pass."""
        out = self._whole(x, tokens, kept=True)
        return out.x, LatentBuffer(out.places, out.state)

    def refine(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        positions: Positions,
        buffer: LatentBuffer,
        *,
        memory: Float[Array, "B n D"] | None = None,
    ) -> tuple[Float[Array, "B n D"], LatentBuffer]:
        """Computes some positions anew, on the others' buffered keys, values, states.

        Source: algorithm 1, line 5.

        Args:
          x: embeddings of all T tokens; only those at `positions` are read.
          positions: n of them.
          buffer: of all T.
          memory: what enters them; None: the states before them, as the config says.

        Returns:
          The last layer's output at `positions`, and the buffer with their fresh keys,
          values and states.

        Raises:
          ValueError: the buffer or the memory is of another shape, or the model has no
            memory.
        """
        B, T, D = x.shape
        if self.config.memory is None:
            raise ValueError("refine: the model has no memory: set stack.memory")
        if buffer.states.shape != (B, T, D):
            raise ValueError(
                f"refine: wants a buffer of states {(B, T, D)}, got "
                f"{buffer.states.shape}"
            )
        n = len(indices(positions, T))
        if memory is None:
            memory = take(self.memory_of(buffer.states, tokens.ids), positions)
        elif memory.shape != (B, n, D):
            raise ValueError(
                f"refine: wants a memory of shape {(B, n, D)}, got {memory.shape}"
            )
        seen = Pass(
            x0=rms(take(x, positions)),
            ids=take(tokens.ids, positions),
            memory=self._projected(memory),
            position=jnp.asarray(indices(positions, T), jnp.int32)[None],
            positions=positions,
            segments=tokens.segments,
        )
        out = self._run(seen, buffer.groups)
        states = put(buffer.states, positions, out.state)
        return out.x, LatentBuffer(out.places, states)

    def empty_buffer(self, x: Float[Array, "B T D"]) -> LatentBuffer:
        """Makes a buffer of zeros; positions not yet computed must not be seen."""
        config = self.config
        B, T, _ = x.shape
        repeats = config.layers // config.pattern
        shape = (repeats, B, T, config.key_heads, config.head_width)
        zeros = jnp.zeros(shape, x.dtype)
        groups = tuple(Buffer(zeros, zeros) for _ in range(config.pattern))
        return LatentBuffer(groups, jnp.zeros_like(x))

    def memory_of(
        self, states: Float[Array, "B T D"], ids: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns what enters each position: a mix of the states before it."""
        memory = self.config.memory
        assert memory is not None
        return entering(states, ids, memory, self._lag_logits())

    def sweep(
        self,
        x: Float[Array, "B T D"],
        cache: LatentCache,
        tokens: Tokens,
        *,
        sweeps: int,
    ) -> tuple[Float[Array, "B T D"], LatentCache, Float[Array, ""]]:
        """Approximates the recurrence by parallel passes over all T tokens.

        Pass 0 has only the cache's states as memory; each further one takes the states
        of the one before. Where it stands still it is the exact recurrence.

        Args:
          cache: with room for the tokens; the passes do not see each other's writes.
          sweeps: passes after the first; T of them are exact.

        Returns:
          As the call, and the largest change of a state in the last pass.
        """
        memory = self.config.memory
        if memory is None or memory.depth == 0 or 0 in memory.lags:
            raise NotImplementedError("sweep: wants a memory of earlier tokens")
        B, T, _ = x.shape
        count = jnp.full(B, T) if tokens.lengths is None else tokens.lengths
        states = jnp.zeros_like(x)
        residual = jnp.zeros((), jnp.promote_types(x.dtype, jnp.float32))
        y, new = x, cache
        real = (jnp.arange(T) < count[:, None])[..., None]
        for _ in range(sweeps + 1):
            enters = entering(
                states, tokens.ids, memory, self._lag_logits(), before=cache.states
            )
            out = self._pass_on_cache(x, enters, cache, tokens)
            change = jnp.where(real, out.state - states, 0)
            residual = jnp.abs(change).max().astype(residual.dtype)
            states, y = out.state, out.x
            new = self._after(cache, out, tokens, states)
        return y, new, residual

    def memory_of_token(
        self, x: Float[Array, "B 1 D"], cache: LatentCache, tokens: Tokens
    ) -> Float[Array, "B 1 D"]:
        """Returns what enters one more token of every row, in the exact recurrence.

        The state of lag 0 takes a forward of its own.
        """
        memory = self.config.memory
        assert memory is not None
        old, _ = forgotten(cache.states, x, tokens, memory)
        own = x
        if 0 in memory.lags:
            own = self._pass_on_cache(x, None, cache, tokens).state
        parts = [
            own if lag == 0 else old[:, lag - 1 : lag].astype(x.dtype)
            for lag in memory.lags
        ]
        return mixed_lags(parts, self._lag_logits())

    def _whole(self, x: Array, tokens: Tokens, *, kept: bool) -> Output:
        seen = Pass(
            x0=rms(x),
            ids=tokens.ids,
            memory=None,
            position=jnp.arange(x.shape[1])[None],
            segments=tokens.segments,
        )
        return self._run(seen, Whole(kept))

    def _on_cache(
        self, x: Array, memory: Array | None, cache: LatentCache, tokens: Tokens
    ) -> tuple[Array, LatentCache]:
        out = self._pass_on_cache(x, memory, cache, tokens)
        return out.x, self._after(cache, out, tokens, out.state)

    def _pass_on_cache(
        self, x: Array, memory: Array | None, cache: LatentCache, tokens: Tokens
    ) -> Output:
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
        groups = tuple(g._replace(position=cache.position) for g in cache.groups)
        return self._run(seen, groups)

    def _after(
        self, cache: LatentCache, out: Output, tokens: Tokens, states: Array
    ) -> LatentCache:
        """Moves the rows on, and keeps each row's last states, newest first."""
        B, T, _ = out.x.shape
        count = jnp.full(B, T) if tokens.lengths is None else tokens.lengths
        groups = tuple(
            new._replace(position=old.position, layer=old.layer)
            for new, old in zip(out.places, cache.groups, strict=True)
        )
        memory, kept = self.config.memory, cache.states
        if memory is not None and memory.depth:
            kept = newest(cache.states, states, tokens, memory)
        return LatentCache(cache.position + count, groups, kept)

    def _token(
        self, x: Array, cache: LatentCache, tokens: Tokens
    ) -> tuple[Array, LatentCache]:
        return self._on_cache(x, self.memory_of_token(x, cache, tokens), cache, tokens)

    def _one_after_another(
        self, x: Array, cache: LatentCache, tokens: Tokens
    ) -> tuple[Array, LatentCache]:
        lengths = tokens.lengths

        def advance(cache, inputs):
            x, ids, t = inputs
            one = None if lengths is None else (t < lengths).astype(jnp.int32)
            y, cache = self._token(x[:, None], cache, Tokens(ids[:, None], None, one))
            return cache, y[:, 0]

        steps = jnp.arange(x.shape[1])
        columns = (jnp.swapaxes(x, 0, 1), tokens.ids.T, steps)
        cache, y = jax.lax.scan(advance, cache, columns)
        return jnp.swapaxes(y, 0, 1), cache

    def _lag_logits(self) -> Array | None:
        return None if self.lag_logits is None else self.lag_logits[...]

    def _projected(self, state: Array) -> Memory:
        memory = Memory(state)
        return memory if self.memory is None else self.memory(memory)

    def _run(self, seen: Pass, places: Whole | tuple) -> Output:
        """Runs all layers; `places` has one place for each in the pattern."""
        config = self.config
        P = config.pattern
        whole = isinstance(places, Whole)
        buffers = places if not whole and isinstance(places[0], Buffer) else ()
        caches = () if whole or buffers else places
        weights = self._source_weights(seen.x0.dtype)
        stream = self._stream(seen.x0)

        def repeat(carry, turn):
            stream, state, caches = carry
            blocks, buffers, number = turn
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
                    state = state + weights[layer] * stream.x
            return (stream, state, tuple(written)), tuple(kept)

        zero = None if weights is None else jnp.zeros_like(seen.x0)
        repeats = config.layers // P
        (stream, state, caches), kept = scan_layers(
            repeat,
            (stream, zero, caches),
            (tuple(self.blocks), buffers, jnp.arange(repeats, dtype=jnp.int32)),
            remat=config.remat,
            unroll=min(config.unroll, repeats),
            cached=bool(caches),
        )
        state = stream.x if state is None else state
        if config.memory is not None and config.memory.normed:
            state = rms(state)
        return Output(stream.x, state, caches or kept)

    def _stream(self, x0: Array) -> Stream:
        config = self.config
        B, n, D = x0.shape
        values, history = None, None
        if config.value_residual == "first":
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
        layers = jnp.asarray(memory.sources) - 1
        shares = jnp.ones(1, dtype)
        if self.source_logits is not None:
            shares = jax.nn.softmax(self.source_logits[...]).astype(dtype)
        return jnp.zeros(L, dtype).at[layers].set(shares)
