"""The schedules of the recurrence: exact, by subsets for training, by sweeps."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from recurjax.layers.attention import check_room, empty_key_value_cache
from recurjax.layers.mesh import UncutStack
from recurjax.layers.stack import CacheRows
from recurjax.types import Array, Tokens
from recurjax.variants.latent_recurrent_transformer.caches import (
    LatentBuffer,
    LatentCache,
    Output,
)
from recurjax.variants.latent_recurrent_transformer.lags import (
    entering,
    forgotten,
    mixed_lags,
    newest,
)
from recurjax.variants.latent_recurrent_transformer.passes import LatentPasses
from recurjax.variants.latent_recurrent_transformer.places import Buffer, slots_of
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    Positions,
    indices,
    put,
    take,
)


class LatentRecurrentTransformerStack(CacheRows, LatentPasses, UncutStack):
    """The recurrence and its schedules, over the passes of `LatentPasses`.

    Called as every stack it is the exact recurrence, one token after another (without a
    memory: all at once). `initial` and `refine` are what training is made of; `sweep`
    reads prompts approximately.
    """

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
            self._check_room(cache, T, tokens)
        if self.config.memory is None:
            if training:
                return self.pass_over_all(x, tokens, kept=False).x, cache
            return self._on_cache(x, None, cache, tokens)
        if tokens.segments is not None:
            raise NotImplementedError(
                "LatentRecurrentTransformerStack: the exact recurrence takes no "
                "segments; use memory.reset_token"
            )
        # The exact recurrence is a decode, also in training: each token needs the last
        # layer's state of the one before. The parallel passes are for objectives and
        # sweeps.
        own = self.init_cache(B, T, x.dtype) if training else cache
        if T == 1:
            y, own = self._token(x, own, tokens)
        else:
            y, own = self._one_after_another(x, own, tokens)
        return y, cache if training else own

    def initial(
        self, x: Float[Array, "B T D"], tokens: Tokens, *, origins: bool = False
    ) -> tuple[Float[Array, "B T D"], LatentBuffer]:
        """Runs all positions at once with a memory of zero: the initialization pass.

        Args:
          origins: leave in the buffer what `refreshed` needs.
        """
        out = self.pass_over_all(x, tokens, kept=True, origins=origins)
        return out.x, LatentBuffer(out.places, out.state)

    def refreshed(
        self,
        buffer: LatentBuffer,
        ids: Int[Array, "B T"],
        *,
        visited: Bool[Array, " T"],
    ) -> LatentBuffer:
        """Renews keys and values of unvisited positions from the latest states.

        Without another pass: see `LatentBlock.refreshed`. Its products are not among
        `flops_per_token`.

        Args:
          buffer: of `initial` with `origins`, and whatever was refined since.
          ids: of all T tokens.
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
            raise ValueError("refreshed: wants a buffer made with origins=True")
        memory = self._projected(self.memory_of(buffer.states, ids))
        position = jnp.arange(ids.shape[1])[None]

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
        out = self.pass_at_positions(x, tokens, positions, buffer, memory)
        states = put(buffer.states, positions, out.state)
        # The other positions keep what an earlier pass left.
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

    def prefill(
        self, x: Float[Array, "B T D"], cache: LatentCache, tokens: Tokens, *, by: str
    ) -> tuple[Float[Array, "B T D"], LatentCache, dict[str, Float[Array, ""]]]:
        """Reads prompts by "sweeps:N"; reports what the last sweep still changed."""
        count = int(by.removeprefix("sweeps:"))
        x, cache, residual = self.sweep(x, cache, tokens, sweeps=count)
        return x, cache, {"largest change of a state in the last sweep": residual}

    def refuses_prefill(self, by: str) -> str | None:
        """Says why prompts cannot be read in a way, or None when they can."""
        kind, _, count = by.partition(":")
        if kind != "sweeps" or not count.isdecimal() or int(count) < 1:
            return f'prefill must be "exact" or like "sweeps:4", got {by!r}'
        memory = self.config.memory
        if memory is None or 0 in memory.lags:
            return (
                f"prefill {by} is for models whose memory is of earlier tokens: leave "
                'it at "exact"'
            )
        return None

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
        self._check_room(cache, T, tokens)
        count = jnp.full(B, T) if tokens.lengths is None else tokens.lengths
        states = jnp.zeros_like(x)
        # Each pass makes one token more exact: its memory is right once the states
        # before it are. So T passes are the recurrence, and far fewer come close.
        residual = jnp.zeros((), jnp.promote_types(x.dtype, jnp.float32))
        y, new = x, cache
        # Padding does not count in what a sweep still changed.
        real = (jnp.arange(T) < count[:, None])[..., None]
        for _ in range(sweeps + 1):
            enters = entering(
                states, tokens.ids, memory, self._lag_logits(), before=cache.states
            )
            out = self.pass_on_cache(x, enters, cache, tokens)
            # Padding has states too, which nobody reads.
            change = jnp.where(real, out.state - states, 0)
            residual = jnp.abs(change).max().astype(residual.dtype)
            states, y = out.state, out.x
            # Each pass starts from the caller's cache: the last one's writes stay, and
            # none adds to another's.
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
        # A reset token forgets what came before it, also for itself.
        old, _ = forgotten(cache.states, x, tokens, memory)
        own = x
        if 0 in memory.lags:
            own = self.pass_on_cache(x, None, cache, tokens).state
        parts = [
            own if lag == 0 else old[:, lag - 1 : lag].astype(x.dtype)
            for lag in memory.lags
        ]
        return mixed_lags(parts, self._lag_logits())

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
        memory = None if self.config.memory is None else self._entering(x, tokens)
        yield from self.states_on_memory(x, memory, tokens)

    def _entering(self, x: Array, tokens: Tokens) -> Float[Array, "B T D"]:
        """Returns what enters each token in the exact recurrence."""

        def advance(cache, column):
            x, ids = column
            one = Tokens(ids[:, None])
            memory = self.memory_of_token(x[:, None], cache, one)
            _, cache = self._on_cache(x[:, None], memory, cache, one)
            return cache, memory[:, 0]

        cache = self.init_cache(x.shape[0], x.shape[1], x.dtype)
        columns = (jnp.swapaxes(x, 0, 1), tokens.ids.T)
        _, memory = jax.jit(partial(jax.lax.scan, advance))(cache, columns)
        return jnp.swapaxes(memory, 0, 1)

    def _check_room(self, cache: LatentCache, length: int, tokens: Tokens) -> None:
        if tokens.lengths is not None:  # how many of them are real is not known here
            return
        for group, window in zip(cache.groups, self.config.layer_windows, strict=False):
            check_room(type(self).__name__, length, slots=group.slots, window=window)

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
            # A row that has ended takes steps of no token, which leave its cache as it
            # is.
            one = None if lengths is None else (t < lengths).astype(jnp.int32)
            y, cache = self._token(x[:, None], cache, Tokens(ids[:, None], None, one))
            return cache, y[:, 0]

        steps = jnp.arange(x.shape[1])
        columns = (jnp.swapaxes(x, 0, 1), tokens.ids.T, steps)
        cache, y = jax.lax.scan(advance, cache, columns)
        return jnp.swapaxes(y, 0, 1), cache

    def _on_cache(
        self, x: Array, memory: Array | None, cache: LatentCache, tokens: Tokens
    ) -> tuple[Array, LatentCache]:
        out = self.pass_on_cache(x, memory, cache, tokens)
        return out.x, self._after(cache, out, tokens, out.state)

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

    def _lag_logits(self) -> Array | None:
        return None if self.lag_logits is None else self.lag_logits[...]
