"""The schedules of a latent memory, for every stack whose passes take one.

A pass runs some tokens through all layers, with what enters them as the memory. The
exact recurrence makes one per token; sweeps approximate it by passes over all.
"""

from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.layers.stack import CacheRows
from recurjax.types import Array, Tokens
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    Positions,
    entering,
    forgotten,
    mixed_lags,
    newest,
)

_MANY_STEPS = 16
"""Steps after which a layout of the matrices for them has paid off."""


class PassOutput(NamedTuple):
    """The result of a pass: last layer's output, source state, keys and values."""

    x: Float[Array, "B n D"]
    state: Float[Array, "B n D"]
    stores: tuple


class MemoryStack(CacheRows):
    """A stack whose tokens receive states of earlier ones as a memory.

    Its config's `memory` says which, or is None. A cache has `position` and `states`,
    [B, N, D], the last N states of each row, newest first.
    """

    config: Any

    def pass_on_cache(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B T D"] | None,
        cache: Any,
        tokens: Tokens,
    ) -> PassOutput:
        """Runs T more tokens of every row after the cached ones.

        Args:
          memory: what enters them; None: zero.
        """
        raise NotImplementedError

    def after(
        self, cache: Any, out: PassOutput, tokens: Tokens, states: Float[Array, "B T D"]
    ) -> Any:
        """Returns the cache after a pass: rows moved on, with their last states."""
        raise NotImplementedError

    def check_room(self, cache: Any, length: int, tokens: Tokens) -> None:
        """Raises ValueError where a cache has too few slots."""

    def for_many_steps(self, *, rows: int) -> Self:
        """Returns the stack as a loop over many tokens of so many rows runs it."""
        del rows
        return self

    def initial(
        self, x: Float[Array, "B T D"], tokens: Tokens, *, origins: bool = False
    ) -> tuple[Array, Any]:
        """Runs all positions at once with a memory of zero: the initialization pass.

        Args:
          origins: leave in the buffer what a memory needs to enter keys later.

        Returns:
          The last layer's output, and a buffer of the states that later tokens receive.
        """
        raise NotImplementedError

    def refine(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        positions: Positions,
        buffer: Any,
    ) -> tuple[Array, Any]:
        """Recomputes some positions on the states that earlier passes left."""
        raise NotImplementedError

    def add_logits(self) -> None:
        """Adds the parameters of learned averages, one logit a lag or source."""
        memory, lags, sources = self.config.memory, 0, 0
        if memory is not None:
            lags = len(memory.lags) if memory.combine == "average" else 0
            sources = len(memory.sources)
        # With one lag or source a softmax of one logit would always be 1.
        logits = lambda n: nnx.Param(jnp.zeros(n)) if n > 1 else None  # noqa: E731
        self.lag_logits, self.source_logits = logits(lags), logits(sources)

    def exact(
        self, x: Float[Array, "B T D"], cache: Any | None, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs the exact recurrence, one token after another.

        Args:
          cache: None: rows begin, as in training. The recurrence is a decode there too,
            as each token needs the state of the one before; the parallel passes are for
            objectives and sweeps.
        """
        if tokens.segments is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: the exact recurrence takes no segments: use "
                "memory.reset_token"
            )
        if cache is None:
            cache = self.init_cache(x.shape[0], x.shape[1], x.dtype)
        if x.shape[1] == 1:
            return self._token(x, cache, tokens)
        return self._one_after_another(x, cache, tokens)

    def without_memory(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Float[Array, "B T D"]:
        """Runs all positions at once with a memory of zero."""
        return self.initial(x, tokens)[0]

    def memory_of(
        self, states: Float[Array, "B T D"], tokens: Tokens
    ) -> Float[Array, "B T D"]:
        """Returns what enters each position: a mix of its document's earlier states."""
        memory = self.config.memory
        assert memory is not None
        return entering(states, tokens, memory, self._lag_logits())

    def prefill(
        self, x: Float[Array, "B T D"], cache: Any, tokens: Tokens, *, by: str
    ) -> tuple[Float[Array, "B T D"], Any, dict[str, Float[Array, ""]]]:
        """Reads prompts by "sweeps:N"; reports what the last sweep still changed."""
        count = int(by.removeprefix("sweeps:"))
        x, cache, residual = self.sweep(x, cache, tokens, sweeps=count)
        return x, cache, {"largest change of a state in the last sweep": residual}

    def refuses_prefill(self, by: str) -> str | None:
        """Returns why prompts cannot be read in a way, or None when they can."""
        kind, _, count = by.partition(":")
        if kind != "sweeps" or not count.isdecimal() or int(count) < 1:
            return f'prefill must be "exact" or like "sweeps:4", got {by!r}'
        memory = self.config.memory
        if memory is None or 0 in memory.lags:
            return (
                f"prefill {by} approximates a memory of earlier tokens, which this "
                'model lacks: leave it at "exact"'
            )
        return None

    def sweep(
        self,
        x: Float[Array, "B T D"],
        cache: Any,
        tokens: Tokens,
        *,
        sweeps: int,
    ) -> tuple[Float[Array, "B T D"], Any, Float[Array, ""]]:
        """Approximates the recurrence by parallel passes over all T tokens.

        Pass 0 has only the cache's states as memory; each further pass takes the states
        of the one before. Its fixed point is the exact recurrence.

        Args:
          cache: with room for the tokens; the passes do not see each other's writes.
          sweeps: passes after the first; T of them are exact.

        Returns:
          As the call, and the largest change of a state in the last pass.
        """
        memory = self.config.memory
        if memory is None or memory.depth == 0 or 0 in memory.lags:
            raise NotImplementedError(
                "sweep: stack.memory must read earlier tokens, not lag 0: use "
                "lags of at least 1"
            )
        B, T, _ = x.shape
        self.check_room(cache, T, tokens)
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
                states, tokens, memory, self._lag_logits(), before=cache.states
            )
            out = self.pass_on_cache(x, enters, cache, tokens)
            # Padding has states too, which nobody reads.
            change = jnp.where(real, out.state - states, 0)
            residual = jnp.abs(change).max().astype(residual.dtype)
            states, y = out.state, out.x
            # Each pass starts from the caller's cache: the last one's writes stay, and
            # none adds to another's.
            new = self.after(cache, out, tokens, states)
        return y, new, residual

    def memory_of_token(
        self, x: Float[Array, "B 1 D"], cache: Any, tokens: Tokens
    ) -> Float[Array, "B 1 D"]:
        """Returns what enters one more token of every row, in the exact recurrence.

        The state of lag 0 takes a forward of its own.
        """
        memory = self.config.memory
        assert memory is not None
        # A reset token forgets what came before it, also for itself.
        old, _ = forgotten(cache.states, x, tokens, memory)
        state = x
        if 0 in memory.lags:
            state = self.pass_on_cache(x, None, cache, tokens).state
        parts = [
            state if lag == 0 else old[:, lag - 1 : lag].astype(x.dtype)
            for lag in memory.lags
        ]
        return mixed_lags(parts, self._lag_logits())

    def on_cache(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B T D"] | None,
        cache: Any,
        tokens: Tokens,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs T more tokens of every row at once, on a memory that the caller chose.

        Args:
          memory: what enters them; None: zero.
        """
        out = self.pass_on_cache(x, memory, cache, tokens)
        return out.x, self.after(cache, out, tokens, out.state)

    def exact_memory(self, x: Array, tokens: Tokens) -> Float[Array, "B T D"]:
        """Returns what enters each token in the exact recurrence."""

        def advance(cache, column):
            x, ids = column
            token = Tokens(ids[:, None])
            memory = self.memory_of_token(x[:, None], cache, token)
            _, cache = self.on_cache(x[:, None], memory, cache, token)
            return cache, memory[:, 0]

        cache = self.init_cache(x.shape[0], x.shape[1], x.dtype)
        columns = (jnp.swapaxes(x, 0, 1), tokens.ids.T)
        _, memory = jax.jit(partial(jax.lax.scan, advance))(cache, columns)
        return jnp.swapaxes(memory, 0, 1)

    def kept(
        self, cache: Any, states: Float[Array, "B T D"], tokens: Tokens
    ) -> Float[Array, "B N D"]:
        """Returns each row's last states after a pass, newest first."""
        memory = self.config.memory
        if memory is None or not memory.depth:
            return cache.states
        return newest(cache.states, states, tokens, memory)

    def source_weights(self, dtype) -> Array | None:
        """Returns each layer's share of the state; None: it is the last layer's."""
        memory, L = self.config.memory, self.config.layers
        if memory is None or memory.sources == (L,):
            return None
        # Sources number layers from 1.
        layers = jnp.asarray(memory.sources) - 1
        shares = jnp.ones(1, dtype)
        if self.source_logits is not None:
            shares = jax.nn.softmax(self.source_logits[...]).astype(dtype)
        return jnp.zeros(L, dtype).at[layers].set(shares)

    def _token(self, x: Array, cache: Any, tokens: Tokens) -> tuple[Array, Any]:
        return self.on_cache(x, self.memory_of_token(x, cache, tokens), cache, tokens)

    def _one_after_another(
        self, x: Array, cache: Any, tokens: Tokens
    ) -> tuple[Array, Any]:
        lengths = tokens.lengths
        few = x.shape[1] < _MANY_STEPS
        stack = self if few else self.for_many_steps(rows=len(x))

        def advance(cache, inputs):
            x, ids, t = inputs
            # A row that has ended takes steps of no token, which leave its cache as it
            # is.
            valid = None if lengths is None else (t < lengths).astype(jnp.int32)
            token = Tokens(ids[:, None], None, valid)
            y, cache = stack._token(x[:, None], cache, token)
            return cache, y[:, 0]

        steps = jnp.arange(x.shape[1])
        columns = (jnp.swapaxes(x, 0, 1), tokens.ids.T, steps)
        cache, y = jax.lax.scan(advance, cache, columns)
        return jnp.swapaxes(y, 0, 1), cache

    def _lag_logits(self) -> Array | None:
        return None if self.lag_logits is None else self.lag_logits[...]
