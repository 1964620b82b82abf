"""Decoding in which each token leaves a stack of loops when a rule lets it.

The reference: one text at a time, the host looks at every loop's score. An engine does
the same with many texts at different loops.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from recurjax.errors import UserError
from recurjax.exits import (
    ExitHead,
    ExitRule,
    RuleKind,
    confidence,
    cosine,
    exits_of,
    head_score,
)
from recurjax.inference.decoding import DecodeState, draw
from recurjax.inference.sampling import SamplingConfig, sampling_rows
from recurjax.model import Decoder
from recurjax.types import Array, Cache, Missing, Tokens


@dataclass(frozen=True, kw_only=True)
class EarlyExit:
    """How tokens leave early.

    Attributes:
      rule: when.
      missing: what becomes of the keys and values that they then lack.
      head: of the rule "head".
    """

    rule: ExitRule
    missing: Missing = "propagate"
    head: ExitHead | None = None


class Leaving(NamedTuple):
    """How a token was made.

    Attributes:
      loops: run, 1 .. B.
      scores: of the rule after each of them; the deepest's is not compared.
      logits: of the loop by which it left.
    """

    loops: int
    scores: list[float]
    logits: Float[Array, " V"]


def check_exits(model: Decoder, exits: EarlyExit) -> None:
    """Refuses exits that a model does not have.

    Raises:
      UserError: its stack has no loops, or others than the rule needs.
    """
    reason = exits_of(model).refuses_exits(exits.missing)
    if reason is not None:
        raise UserError(reason)
    if exits.rule.kind == "head" and exits.head is None:
        raise UserError(
            "the rule head needs a trained exit head: fit one with recurjax evaluate "
            "exits RUN --fit-head 100, on 100 batches"
        )


class ExitDecoder:
    """Continues one text that was read through all loops.

    Args of a call are those of `decode_step`; the state's batch is one row.
    """

    def __init__(
        self,
        model: Decoder,
        exits: EarlyExit,
        *,
        positions: int,
        prompt: int,
        sampling: SamplingConfig,
    ):
        """Prepares for a text.

        Args:
          positions: of the cache.
          prompt: how many tokens were read.
        """
        self.model, self.exits = model, exits
        self.sampling = sampling_rows([sampling])
        self._loops = exits_of(model).exits
        self._at = prompt
        # Loops run by the token at each position; those not there yet count as all.
        self._ran = np.full((1, positions), self._loops, np.int32)

    def compile(self, state: DecodeState, keys: Array, eos: Array) -> None:
        """Runs every program once, on copies of what they would overwrite.

        The steps after it take no time for compiling, wherever their tokens leave.
        """
        missing, newest = self.exits.missing, state.newest
        ran = jnp.asarray(self._ran) if missing == "skip" else None
        x, cache = _enter(self.model, newest, state.cache), _copied(state.cache)
        kind, head = self.exits.rule.kind, self.exits.head
        for b in range(1, self._loops + 1):
            x, cache, logits, _ = _loop(
                self.model, x, cache, newest, ran, head, b, kind
            )
            left = _leave(self.model, x, _copied(cache), newest, b, missing)
            drawn = state._replace(cache=left)
            drawn = _draw(drawn, logits, keys, eos, sampling=self.sampling)
            jax.block_until_ready(drawn)

    def step(
        self, state: DecodeState, keys: Array, eos: Array
    ) -> tuple[DecodeState, Leaving]:
        """Reads the newest token, as far as the rule says, and draws the next."""
        rule, missing = self.exits.rule, self.exits.missing
        # Only "skip" leaves places without keys, which later tokens must not see.
        ran = jnp.asarray(self._ran) if missing == "skip" else None
        x, cache = _enter(self.model, state.newest, state.cache), state.cache
        scores, b, logits = [], 0, None
        for b in range(1, self._loops + 1):
            x, cache, logits, score = _loop(
                self.model, x, cache, state.newest, ran, self.exits.head, b, rule.kind
            )
            # The host waits for the number here: it decides whether another loop is
            # run.
            scores.append(float(score))
            if scores[-1] > rule.threshold:
                break
        assert logits is not None
        cache = _leave(self.model, x, cache, state.newest, b, missing)
        # Kept for the tokens to come: loops deeper than b have no key at this place.
        self._ran[0, self._at] = b
        self._at += 1
        state = _draw(
            state._replace(cache=cache), logits, keys, eos, sampling=self.sampling
        )
        return state, Leaving(b, scores, logits[0])


def _copied(cache: Cache) -> Cache:
    return jax.tree.map(jnp.copy, cache)


@jax.jit
def _enter(model: Decoder, newest: Int[Array, " B"], cache: Cache) -> Array:
    return exits_of(model).enter(model.embed(newest[:, None]), cache)


@partial(jax.jit, static_argnums=(6, 7), donate_argnums=2)
def _loop(
    model: Decoder,
    x: Float[Array, "B 1 D"],
    cache: Cache,
    newest: Int[Array, " B"],
    ran: Int[Array, "B N"] | None,
    head: ExitHead | None,
    b: int,
    kind: RuleKind,
) -> tuple[Array, Cache, Float[Array, "B V"], Float[Array, ""]]:
    """Runs loop b (from 1): the state and the cache after it, logits and score."""
    stack = exits_of(model)
    before = x
    x, cache = stack.loop(x, b - 1, cache, Tokens(newest[:, None]), ran=ran)
    # Every loop is read by the model's own final norm and head, as the deepest is.
    normed = model.final_norm(x)
    logits = model.logits(normed)[:, 0]
    if kind == "confidence":
        score = confidence(logits)
    elif kind == "cosine":
        score = cosine(before, x)
    # The deepest loop has no head and needs no score: the token leaves there anyway.
    elif b < stack.exits:
        assert head is not None
        score = head_score(head, b, normed)
    else:
        score = jnp.zeros(1)
    return x, cache, logits, score.reshape(())


@partial(jax.jit, static_argnums=(4, 5), donate_argnums=2)
def _leave(
    model: Decoder,
    x: Float[Array, "B 1 D"],
    cache: Cache,
    newest: Int[Array, " B"],
    b: int,
    missing: Missing,
) -> Cache:
    """Moves the row on, with the keys and values of the loops not run, if wanted."""
    stack = exits_of(model)
    tokens = Tokens(newest[:, None])
    if missing == "propagate":
        cache = stack.propagate(x, b, cache, tokens)
    return stack.advance(cache, tokens)


_draw: Callable[..., DecodeState] = jax.jit(draw)
