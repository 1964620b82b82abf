"""Lossless speculation: a recursive model's first loop drafts, and the others verify.

The first loop reads k tokens one after another and drafts the successor of each but the
last. The other loops then read the k states in one pass, of which the full model's
logits say which drafts are accepted. The first loop's keys, values and states are not
computed again. A step so takes k + R - 1 passes of the block, and draws
(1 - a^k) / (1 - a) tokens if a draft is accepted with probability a. Source of the
acceptance rule: Leviathan et al. 2023.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from recurjax.exits import ExitHead, exits_of
from recurjax.inference.compute_dtype import cache_dtype
from recurjax.inference.engine.slots import NO_TOKEN, Outputs, Slots, draw
from recurjax.inference.sampling import Draft
from recurjax.model import Decoder, as_exits
from recurjax.types import Array, Cache, LoopPositions


def refuse_speculation(model: Decoder, speculate: int) -> str | None:
    """Returns why a model's first loop cannot draft, or None."""
    stack = as_exits(model.stack)
    if stack is None or stack.exits == 1:
        kind = "1 loop" if stack else f"a {type(model.config.stack).__name__}"
        return (
            f"speculate {speculate} needs a recursive model of at least 2 loops, whose "
            f"first one drafts, and this one has {kind}: leave speculate out"
        )
    if (reason := stack.refuses_exits(stack.missing)) is not None:
        return f"speculate {speculate} drafts by an early exit: {reason}"
    if (reason := stack.refuses_ticks(rollback=True)) is not None:
        return f"speculate {speculate} takes rejected drafts back: {reason}"
    return None


@dataclass(frozen=True, kw_only=True)
class Speculative:
    """A step drafts up to `most_tokens` tokens of each slot and verifies them.

    `Slots.depth` is the position of the newest token. A rejected draft leaves keys and
    values at later positions than every token that reads, so that causality hides them,
    and the tokens that come to these positions overwrite them.
    """

    most_tokens: int

    def weights(self, model: Decoder, head: ExitHead | None = None) -> Any:
        """The loops' weights, laid out for ticks."""
        del head
        return exits_of(model).tick_weights()

    def loops(self, model: Decoder) -> int:
        """Tokens do not leave early."""
        del model
        return 0

    def empty(
        self, model: Decoder, rows: int, length: int
    ) -> tuple[Cache, Int[Array, " B"]]:
        """Slots of nothing."""
        # Drafts must not overwrite, in a window's ring, what the tokens before them
        # still see.
        ahead = self.most_tokens - 1
        cache = exits_of(model).init_ticks(
            rows, length, cache_dtype(model), ahead=ahead
        )
        return cache, jnp.zeros(rows, jnp.int32)

    def put(
        self,
        model: Decoder,
        slots: Slots,
        row: Int[Array, ""],
        read: Cache,
        *,
        length: Int[Array, ""],
        limit: Int[Array, ""],
    ) -> tuple[Cache, Int[Array, " B"]]:
        """The first new token comes after the prompt."""
        del limit
        cache = exits_of(model).insert_ticks(slots.cache, row, read)
        return cache, slots.depth.at[row].set(length)

    def step(
        self, model: Decoder, weights: Any, slots: Slots, *, top: int
    ) -> tuple[Slots, Outputs]:
        """Drafts with the first loop, runs the others once, and draws what they say."""
        stack, k = exits_of(model), self.most_tokens
        # Drafts draw from a random stream of their own.
        params = slots.params._replace(
            stream=~slots.params.stream,
            logprobs=jnp.zeros_like(slots.params.logprobs),
        )
        zero = jnp.zeros_like(slots.newest)

        def read(drafting: Slots) -> tuple[Array, Bool[Array, " B"], Slots]:
            x = model.embed(drafting.newest[:, None])
            x = stack.enter_ticks(x, drafting.depth)
            live = drafting.active
            lanes = LoopPositions(zero[:, None], drafting.depth[:, None], live[:, None])
            x, cache = stack.tick(x, lanes, drafting.cache, weights, loop=0)
            return x, live, drafting._replace(cache=cache, depth=drafting.depth + 1)

        def guess(drafting: Slots, _: None):
            x, live, drafting = read(drafting)
            logits = model.logits(model.final_norm(x))[:, 0]
            # A stop token or the limit ends a draft as it ends a request.
            drafting, outputs = draw(drafting, logits, live, zero, top=0)
            return drafting, (x, live, Draft(outputs.tokens[:, 0], logits))

        drafting, (x, live, drafts) = jax.lax.scan(
            guess, slots._replace(params=params), length=k - 1
        )
        # The last token's successor needs no draft: the full model draws it.
        x_last, live_last, drafting = read(drafting)
        x = jnp.concatenate([jnp.swapaxes(x[:, :, 0], 0, 1), x_last], axis=1)
        live = jnp.concatenate([live.T, live_last[:, None]], axis=1)
        position = slots.depth[:, None] + jnp.arange(k, dtype=jnp.int32)
        cache = drafting.cache
        for loop in range(1, stack.exits):
            lanes = LoopPositions(jnp.full_like(position, loop), position, live)
            x, cache = stack.tick(x, lanes, cache, weights, loop=loop)
        logits = jnp.swapaxes(model.logits(model.final_norm(x)), 0, 1)

        def verify(carry: tuple[Slots, Bool[Array, " B"]], turn: tuple[Array, Draft]):
            slots, who = carry
            logits, draft = turn
            slots, outputs = draw(slots, logits, who, zero, top=top, draft=draft)
            # A draft that is rejected is never drawn again: see `sample`.
            accepted = outputs.tokens[:, 0] == draft.ids
            loops = jnp.where(accepted, 1, stack.exits)
            loops = jnp.where(who & (draft.ids >= 0), loops, 0)
            outputs = outputs._replace(loops=loops[:, None])
            return (slots, who & accepted & slots.active), outputs

        drafts = Draft(
            ids=jnp.concatenate([drafts.ids, jnp.full_like(zero[None], NO_TOKEN)]),
            logits=jnp.concatenate([drafts.logits, jnp.zeros_like(logits[:1])]),
        )
        drawn, cacheless = slots.drawn, slots._replace(cache=None)
        (slots, _), outputs = jax.lax.scan(
            verify, (cacheless, slots.active), (logits, drafts)
        )
        depth = slots.depth + slots.drawn - drawn
        outputs = jax.tree.map(lambda leaf: jnp.swapaxes(leaf[:, :, 0], 0, 1), outputs)
        return slots._replace(cache=cache, depth=depth), outputs
