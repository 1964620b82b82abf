"""The passes through the layers, and the schedules of the recurrence over them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from recurjax.layers.attention import (
    KeyValueCache,
    check_room,
    empty_key_value_cache,
    slots_for,
)
from recurjax.layers.linear import in_panels, is_composed
from recurjax.layers.mesh import UncutStack
from recurjax.layers.stack import layers_a_turn, make_blocks, scan_layers
from recurjax.types import Array, Tokens
from recurjax.variants.latent_recurrent_transformer.block import (
    FullSequence,
    KeyValueBuffer,
    KeyValueStore,
    LatentBlock,
    MemoryProjection,
    PassInputs,
    ResidualStream,
)
from recurjax.variants.latent_recurrent_transformer.config import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.latent_recurrent_transformer.memory_stack import (
    MemoryStack,
    PassOutput,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    InjectedMemory,
    Positions,
    indices,
    put,
    rms,
    take,
)


class LatentBuffer(NamedTuple):
    """Keys, values and states of all positions of a sequence.

    Attributes:
      groups: keys and values, one for each place in the layer pattern, [R, B, T, K, E].
      states: states of the source layer, which later tokens receive as memory.
    """

    groups: tuple[KeyValueBuffer, ...]
    states: Float[Array, "B T D"]


class LatentCache(NamedTuple):
    """The rows' positions, keys and values, and the last states, newest first."""

    position: Int[Array, " B"]
    groups: tuple[KeyValueCache, ...]
    states: Float[Array, "B N D"]


class LatentRecurrentTransformerStack(
    MemoryStack, UncutStack[LatentRecurrentTransformerConfig]
):
    """L blocks; `blocks[p]` stacks the layers p, p + P, p + 2P, ... of a P-pattern.

    Called as every stack it is the exact recurrence, one token after another (without a
    memory: all at once). `initial` and `refine` are what training is made of; `sweep`
    reads prompts approximately.
    """

    def __init__(self, config: LatentRecurrentTransformerConfig, *, rngs: nnx.Rngs):
        self.config = config

        def block(place: int, layer: Array, rngs: nnx.Rngs) -> LatentBlock:
            return LatentBlock(config, place=place, layer=layer, rngs=rngs)

        self.blocks = nnx.List(
            make_blocks(block, layers=config.layers, pattern=config.pattern, rngs=rngs)
        )
        memory, projection = config.memory, None
        if memory is not None and memory.gated and memory.projection == "shared":
            projection = MemoryProjection(config, rngs=rngs)
        self.memory = projection
        self.add_logits()

    def init_cache(self, batch: int, length: int, dtype) -> LatentCache:
        """Creates the cache for `length` tokens per row; 0 is the training cache.

        Args:
          dtype: dtype of keys, values and states.
        """
        config = self.config
        repeats = config.layers // config.pattern
        groups = tuple(
            empty_key_value_cache(
                repeats,
                batch,
                slots_for(length, window),
                config.key_heads,
                config.head_width,
                dtype,
            )
            for window in config.layer_windows[: config.pattern]
        )
        # Without a memory no states are kept.
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
        if not training:
            self.check_room(cache, T, tokens)
        if self.config.memory is None:
            if training:
                return self._pass_over_all(x, tokens, keep_kv=False).x, cache
            return self.on_cache(x, None, cache, tokens)
        y, working = self.exact(x, None if training else cache, tokens)
        return y, cache if training else working

    def initial(
        self, x: Float[Array, "B T D"], tokens: Tokens, *, origins: bool = False
    ) -> tuple[Float[Array, "B T D"], LatentBuffer]:
        """Runs all positions at once with a memory of zero: the initialization pass.

        Args:
          origins: leave in the buffer what `refreshed` needs.
        """
        out = self._pass_over_all(x, tokens, keep_kv=True, origins=origins)
        return out.x, LatentBuffer(out.stores, out.state)

    def refreshed(
        self,
        buffer: LatentBuffer,
        tokens: Tokens,
        *,
        visited: Bool[Array, " T"],
    ) -> LatentBuffer:
        """Renews keys and values of unvisited positions from the latest states.

        Without another pass: see `LatentBlock.refreshed`. Its products are not among
        `flops_per_token`.

        Args:
          buffer: buffer of `initial` with `origins`, and whatever was refined since.
          tokens: all T tokens.
          visited: positions that were refined, which stay as they are.

        Raises:
          ValueError: no key and no value takes a memory, or the buffer has no origins.
        """
        if self.config.memory is None or not self.config.memory.gated:
            raise ValueError(
                "refreshed: no key and no value takes the memory: set "
                "stack.memory.keys or stack.memory.values"
            )
        if any(group.origin is None for group in buffer.groups):
            raise ValueError("refreshed: buffer must be created with origins=True")
        memory = self._projected(self.memory_of(buffer.states, tokens))
        position = jnp.arange(tokens.ids.shape[1])[None]

        def refresh(block, group):
            return block.refreshed(group, memory, visited=visited, position=position)

        # Layers of one place are stacked: vmap renews them all at once.
        groups = tuple(
            jax.vmap(refresh)(block, group)
            for block, group in zip(self.blocks, buffer.groups, strict=True)
        )
        return buffer._replace(groups=groups)

    def refine(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        positions: Positions,
        buffer: LatentBuffer,
        *,
        memory: Float[Array, "B n D"] | None = None,
    ) -> tuple[Float[Array, "B n D"], LatentBuffer]:
        """Recomputes some positions, on the others' buffered keys, values, states.

        Source: algorithm 1, line 5.

        Args:
          x: embeddings of all T tokens; only those at `positions` are read.
          positions: n of them.
          buffer: buffer of all T positions.
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
            raise ValueError("refine: the model has no latent memory: set stack.memory")
        if buffer.states.shape != (B, T, D):
            raise ValueError(
                f"refine: needs a buffer of states {(B, T, D)}, got "
                f"{buffer.states.shape}"
            )
        n = len(indices(positions, T))
        if memory is None:
            memory = take(self.memory_of(buffer.states, tokens), positions)
        elif memory.shape != (B, n, D):
            raise ValueError(
                f"refine: needs a memory of shape {(B, n, D)}, got {memory.shape}"
            )
        inputs = PassInputs(
            # Only the chosen positions are computed, on the others' buffered keys and
            # values.
            x0=rms(take(x, positions)),
            ids=take(tokens.ids, positions),
            # Without a memory the projections would give zeros: they are left out.
            memory=self._projected(memory),
            position=jnp.asarray(indices(positions, T), jnp.int32)[None],
            positions=positions,
            segments=tokens.segments,
        )
        out = self._run(inputs, buffer.groups)
        states = put(buffer.states, positions, out.state)
        # The other positions keep what an earlier pass left.
        return out.x, LatentBuffer(out.stores, states)

    def empty_buffer(self, x: Float[Array, "B T D"]) -> LatentBuffer:
        """Makes a buffer of zeros; positions not yet computed must not be inputs."""
        config = self.config
        B, T, _ = x.shape
        repeats = config.layers // config.pattern
        shape = (repeats, B, T, config.key_heads, config.head_width)
        zeros = jnp.zeros(shape, x.dtype)
        groups = tuple(KeyValueBuffer(zeros, zeros) for _ in range(config.pattern))
        return LatentBuffer(groups, jnp.zeros_like(x))

    def layer_states(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yields what enters the first layer, and what leaves each.

        All positions run at once, on the memory that the exact recurrence gives them;
        with it they are what the recurrence makes of them, token after token.
        """
        yield x
        # The memory needs the recurrence itself; the layers are then run on it in
        # parallel.
        memory = None if self.config.memory is None else self.exact_memory(x, tokens)
        inputs = PassInputs(
            x0=rms(x),
            ids=tokens.ids,
            memory=None if memory is None else self._projected(memory),
            position=jnp.arange(x.shape[1])[None],
            segments=tokens.segments,
        )

        @jax.jit
        def run(block, stream, layer):
            return block(stream, inputs, FullSequence(keep_kv=False), layer)[0]

        stream = self._stream(inputs.x0)
        for layer in range(self.config.layers):
            repeat, place = divmod(layer, self.config.pattern)
            # One layer's own weights, taken from the stack of its place in the pattern.
            block = jax.tree.map(lambda w, at=repeat: w[at], self.blocks[place])
            stream = run(block, stream, jnp.int32(layer))
            yield stream.x

    def for_many_steps(self, *, rows: int) -> "LatentRecurrentTransformerStack":
        """Lays the blocks' matrices out for a loop over tokens."""
        return _in_panels(self, rows=rows)

    def check_room(self, cache: LatentCache, length: int, tokens: Tokens) -> None:
        """See `MemoryStack.check_room`."""
        if tokens.lengths is not None:  # how many of them are real is not known here
            return
        for group, window in zip(cache.groups, self.config.layer_windows, strict=False):
            check_room(type(self).__name__, length, slots=group.slots, window=window)

    def after(
        self, cache: LatentCache, out: PassOutput, tokens: Tokens, states: Array
    ) -> LatentCache:
        """Returns a cache after a pass: see `MemoryStack.after`."""
        B, T, _ = out.x.shape
        count = jnp.full(B, T) if tokens.lengths is None else tokens.lengths
        groups = tuple(
            new._replace(position=old.position, layer=old.layer)
            for new, old in zip(out.stores, cache.groups, strict=True)
        )
        return LatentCache(
            cache.position + count, groups, self.kept(cache, states, tokens)
        )

    def _pass_over_all(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        *,
        keep_kv: bool,
        origins: bool = False,
    ) -> PassOutput:
        """Runs all positions with a memory of zero; see `FullSequence`."""
        inputs = PassInputs(
            x0=rms(x),
            ids=tokens.ids,
            memory=None,
            position=jnp.arange(x.shape[1])[None],
            segments=tokens.segments,
        )
        return self._run(inputs, FullSequence(keep_kv, origins))

    def pass_on_cache(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B T D"] | None,
        cache: LatentCache,
        tokens: Tokens,
    ) -> PassOutput:
        """Runs T more tokens of every row after the cached ones.

        Args:
          memory: what enters them; None: zero.
        """
        if tokens.segments is not None:
            raise NotImplementedError(
                "LatentRecurrentTransformerStack: segments work with the training "
                "cache (length 0) only: leave them out"
            )
        inputs = PassInputs(
            x0=rms(x),
            ids=tokens.ids,
            memory=None if memory is None else self._projected(memory),
            position=cache.position[:, None] + jnp.arange(x.shape[1]),
            lengths=tokens.lengths,
        )
        # The cache holds the rows' positions once for all layers; each layer's cache
        # gets them here.
        groups = tuple(g._replace(position=cache.position) for g in cache.groups)
        return self._run(inputs, groups)

    def _projected(self, state: Array) -> InjectedMemory:
        memory = InjectedMemory(state)
        return memory if self.memory is None else self.memory(memory)

    def _run(self, inputs: PassInputs, stores: FullSequence | tuple) -> PassOutput:
        """Runs all layers; `stores` has one for each place in the pattern."""
        config = self.config
        P = config.pattern
        # A buffer goes through the scan layer by layer and comes back renewed; a cache
        # is carried, so that a step updates it in place. A pass over everything has
        # neither.
        buffers, caches = (), ()
        if not isinstance(stores, FullSequence):
            if isinstance(stores[0], KeyValueBuffer):
                buffers = stores
            else:
                caches = stores
        weights = self.source_weights(inputs.x0.dtype)
        stream = self._stream(inputs.x0)

        def repeat(carry, turn):
            stream, state, caches = carry
            blocks, buffers, number = turn
            # One turn runs the P layers of the pattern.
            stacked, carried = [], []
            for p, block in enumerate(blocks):
                layer = number * P + p
                store: KeyValueStore
                if isinstance(stores, FullSequence):
                    store = stores
                elif buffers:
                    store = buffers[p]
                else:
                    store = caches[p]._replace(layer=number)
                stream, store = block(stream, inputs, store, layer)
                (carried if caches else stacked).append(store)
                if weights is not None:
                    # The state is a learned mix of several layers' outputs, summed as
                    # they are made.
                    state = state + weights[layer] * stream.x
            return (stream, state, tuple(carried)), tuple(stacked)

        # Summed from zero as layers go by; only the shares of the sources are not zero.
        zero = None if weights is None else jnp.zeros_like(inputs.x0)
        repeats = config.layers // P
        (stream, state, caches), stacked = scan_layers(
            repeat,
            (stream, zero, caches),
            (tuple(self.blocks), buffers, jnp.arange(repeats, dtype=jnp.int32)),
            remat=config.remat,
            unroll=layers_a_turn(
                inputs.x0, config.unroll, repeats, cached=bool(caches)
            ),
            cached=bool(caches),
        )
        # Without shares the state is the last layer's output.
        state = stream.x if state is None else state
        if config.memory is not None and config.memory.normed:
            state = rms(state)
        return PassOutput(stream.x, state, caches or stacked)

    def _stream(self, x0: Array) -> ResidualStream:
        config = self.config
        B, n, D = x0.shape
        values, history = None, None
        if config.value_residual == "first":
            # Layer 0 writes its values here, and the later layers read them.
            shape = (B, n, config.key_heads, config.head_width)
            values = jnp.zeros(shape, x0.dtype)
        if config.input_mixing == "dense":
            history = jnp.zeros((config.layers, B, n, D), x0.dtype)
        return ResidualStream(x0, values, history)


_INPUTS = {"w_out": 2} | dict.fromkeys(("w_q", "w_k", "w_v", "w_up", "w_down"), 1)
"""The axes of each matrix' inputs."""


def _in_panels(
    stack: LatentRecurrentTransformerStack, *, rows: int
) -> LatentRecurrentTransformerStack:
    """Lays its blocks' matrices out for a loop over tokens."""

    def lay_out(path: tuple[Any, ...], leaf: Any) -> Any:
        words = [getattr(key, "name", getattr(key, "key", None)) for key in path]
        name = next((word for word in words[::-1] if word in _INPUTS), None)
        if is_composed(leaf) or name is None or "blocks" not in words:
            return leaf
        return in_panels(leaf, inputs=_INPUTS[name], rows=rows)

    return jax.tree_util.tree_map_with_path(lay_out, stack, is_leaf=is_composed)
