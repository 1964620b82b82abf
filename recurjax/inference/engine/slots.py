"""The slots on the device: their state, and the functions that advance them.

A slot is a row of the batch that decodes. It is free or it holds a request: `admit`
puts a prompt that was read into it and draws the first token; `decode` draws further
ones until a stop token or the limit makes it inactive. An inactive row reads and writes
nothing, so its cache stays as it was when its request ended. A decode strategy says
what a step runs: `SequenceWise`, `DepthWise`, `Verified` or `Speculative`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Key, UInt32

from pallas_kernels import reductions
from recurjax.exits import ExitHead
from recurjax.inference.compute_dtype import cache_dtype
from recurjax.inference.engine.config import MOST_STOPS, RequestSettings
from recurjax.inference.sampling import (
    NOT_FINITE,
    PLAIN,
    Draft,
    RowSampling,
    draw_ids,
    sampling_rows,
)
from recurjax.layers.linear import count_adapters, for_rows
from recurjax.model import Decoder
from recurjax.types import Array, Cache, Tokens

NO_TOKEN = -2
"""In place of a token: the slot drew none in this step."""


class SamplingParams(NamedTuple):
    """The sampling parameters of one request, or of B: `RequestSettings` as arrays.

    Attributes:
      seed, stream: seed and stream of its random numbers.
      limit: how many tokens it may draw.
      stops: tokens that end it; -1 where there are fewer.
      logprobs: whether anybody looks at them.
      threshold: the threshold that scores exceed where tokens leave early.
      adapter: the number of its adapter; None: the model has not several.
    """

    sampling: RowSampling
    seed: UInt32[Array, " B"]
    stream: UInt32[Array, " B"]
    limit: Int[Array, " B"]
    stops: Int[Array, "B M"]
    logprobs: Bool[Array, " B"]
    threshold: Float[Array, " B"]
    adapter: Int[Array, " B"] | None


def sampling_params(
    settings: RequestSettings,
    stops: Collection[int],
    threshold: float,
    *,
    adapters: int = 0,
) -> SamplingParams:
    """Makes the arrays of one request; numpy's, which compile nothing.

    Args:
      stops: all tokens that end it.
      threshold: exit threshold of a request that sets none.
      adapters: how many the model has, none of them included; 0: it has not several.
    """
    # -1 is not a token: unused places end nothing.
    ends = np.full((1, MOST_STOPS), -1, np.int32)
    ends[0, : len(stops)] = sorted(stops)
    named = settings.threshold
    chosen = threshold if named is None else named
    arrays: Any = (
        sampling_rows([settings.sampling]),
        np.array([settings.seed], np.uint32),
        np.array([settings.stream], np.uint32),
        np.array([settings.max_new_tokens], np.int32),
        ends,
        np.array([settings.logprobs]),
        np.array([chosen], np.float32),
        np.array([settings.adapter], np.int32) if adapters else None,
    )
    return SamplingParams(*arrays)


class Slots(NamedTuple):
    """All slots between two calls.

    Attributes:
      cache: cache of all tokens but the newest.
      depth: where tokens are in the stack, where a strategy leaves them there; or None.
      newest: the token that the model has not read yet.
      seen: which tokens a slot's text contains, its prompt's too.
      active: slots whose request continues.
      drawn: how many tokens its request has drawn.
    """

    cache: Cache
    depth: Any
    newest: Int[Array, " B"]
    seen: Bool[Array, "B V"]
    active: Bool[Array, " B"]
    drawn: Int[Array, " B"]
    params: SamplingParams


class Outputs(NamedTuple):
    """The tokens that slots sampled, step by step.

    Attributes:
      tokens: `NO_TOKEN` where a slot drew none.
      loops: loops that made these tokens, where they may leave early or where the full
        model verified a draft; else 0.
      logprobs: log-probabilities of these tokens, if requested.
      top, top_logprobs: the likeliest tokens in their place, where wanted.
    """

    tokens: Int[Array, "B N"]
    loops: Int[Array, "B N"]
    logprobs: Float[Array, "B N"]
    top: Int[Array, "B N K"]
    top_logprobs: Float[Array, "B N K"]


@runtime_checkable
class DecodeStrategy(Protocol):
    """How slots advance: the program of a step and the state that it needs."""

    def weights(self, model: Decoder, head: ExitHead | None = None) -> Any:
        """Returns what a step needs apart from the model, such as packed weights.

        Args:
          head: exit head, for a rule that has one.
        """
        ...

    def loops(self, model: Decoder) -> int:
        """Returns how many loops make a token that does not leave early, or 0."""
        ...

    @property
    def most_tokens(self) -> int:
        """The most tokens that a step draws for a slot."""
        ...

    def empty(self, model: Decoder, rows: int, length: int) -> tuple[Cache, Any]:
        """Creates the cache of free slots, and their `depth`."""
        ...

    def put(
        self,
        model: Decoder,
        slots: Slots,
        row: Int[Array, ""],
        read: Cache,
        *,
        length: Int[Array, ""],
        limit: Int[Array, ""],
    ) -> tuple[Cache, Any]:
        """Puts a prompt of `length` tokens that was read into a slot's row.

        Args:
          read: its cache, of one row.
          limit: how many tokens may be drawn.
        """
        ...

    def step(
        self, model: Decoder, weights: Any, slots: Slots, *, top: int
    ) -> tuple[Slots, Outputs]:
        """Runs the model once; `Outputs` with N = `most_tokens`."""
        ...


@dataclass(frozen=True)
class SequenceWise:
    """A step runs the full model for the newest token of every slot.

    The strategy of every variant, through the stack protocol alone.
    """

    def weights(self, model: Decoder, head: ExitHead | None = None) -> Any:
        """Nothing but the model."""
        del model, head

    def loops(self, model: Decoder) -> int:
        """Tokens do not leave early."""
        return 0

    @property
    def most_tokens(self) -> int:
        """The newest token's successor."""
        return 1

    def empty(self, model: Decoder, rows: int, length: int) -> tuple[Cache, Any]:
        """The model's own cache; every token has gone through the stack."""
        return model.init_cache(rows, length, cache_dtype(model)), None

    def put(
        self,
        model: Decoder,
        slots: Slots,
        row: Int[Array, ""],
        read: Cache,
        *,
        length: Int[Array, ""],
        limit: Int[Array, ""],
    ) -> tuple[Cache, Any]:
        """The stack knows which axes of its cache count rows."""
        del length, limit
        return model.stack.insert(slots.cache, row, read), None

    def step(
        self, model: Decoder, weights: Any, slots: Slots, *, top: int
    ) -> tuple[Slots, Outputs]:
        """Reads each active slot's newest token and draws the next."""
        # A length of 0 is a token that is not there, for attention and recurrent
        # states.
        lengths = slots.active.astype(jnp.int32)
        tokens = Tokens(slots.newest[:, None], lengths=lengths)
        x, cache = model.hidden(tokens, slots.cache)
        slots = slots._replace(cache=cache)
        loops = jnp.zeros_like(slots.newest)
        return draw(slots, model.logits(x[:, 0]), slots.active, loops, top=top)


def empty_slots(
    model: Decoder, *, strategy: DecodeStrategy, rows: int, length: int
) -> Slots:
    """Makes slots that are all free."""
    cache, depth = strategy.empty(model, rows, length)
    drawing = jax.tree.map(jnp.asarray, sampling_rows([PLAIN] * rows))
    zeros = jnp.zeros(rows, jnp.int32)
    return Slots(
        cache=cache,
        depth=depth,
        newest=zeros,
        seen=jnp.zeros((rows, model.config.vocabulary), bool),
        active=jnp.zeros(rows, bool),
        drawn=zeros,
        # Those of a free slot are never read: it is inactive.
        params=SamplingParams(
            sampling=drawing,
            seed=jnp.zeros(rows, jnp.uint32),
            stream=jnp.zeros(rows, jnp.uint32),
            limit=zeros,
            stops=jnp.full((rows, MOST_STOPS), -1, jnp.int32),
            logprobs=jnp.zeros(rows, bool),
            threshold=jnp.zeros(rows, jnp.float32),
            adapter=zeros if count_adapters(model) else None,
        ),
    )


def read_piece(
    model: Decoder,
    cache: Cache,
    ids: Int[Array, "1 W"],
    count: Int[Array, " 1"],
    adapter: Int[Array, " 1"] | None = None,
    *,
    by: str,
) -> tuple[Cache, Float[Array, "1 D"], dict[str, Float[Array, ""]]]:
    """Reads the first `count` of W tokens on a cache of one row.

    Args:
      adapter: see `SamplingParams`.

    Returns:
      The cache, the state from which the token after the last one is predicted, and
      what the way of reading reports.
    """
    model = for_rows(model, adapter)
    # Only real tokens reach the cache: `lengths` keeps the padding out.
    x, cache, report = model.prefill(Tokens(ids, lengths=count), cache, by=by)
    return cache, x[:, count[0] - 1], report


def read_slots(
    model: Decoder,
    slots: Slots | None,
    ids: Int[Array, "B W"],
    counts: Int[Array, " B"],
    params: SamplingParams,
    *,
    by: str,
    top: int,
    length: int | None = None,
) -> tuple[Slots, Outputs, dict[str, Float[Array, ""]]]:
    """Reads prompts into free slots, all in one call, and draws their first tokens.

    The prompts are read on the slots' own cache: nothing is copied into it.

    Args:
      slots: slots whose step is `SequenceWise`; None: all are free, and of `length`.
      ids: prompts, padded on the right.
      counts: their lengths; 0: the slot reads nothing and continues as it was.
      params: sampling parameters of the requests; those of slots that read nothing are
        ignored.
      by: how prompts are read, see `Decoder.prefill`.

    Returns:
      The slots, the first tokens, and what the way of reading reports.
    """
    B, W = ids.shape
    reads = counts > 0
    if slots is None:
        # Created inside the program, so that it is never copied to the device.
        assert length is not None
        slots = empty_slots(model, strategy=SequenceWise(), rows=B, length=length)
    else:
        slots = slots._replace(cache=model.stack.reset(slots.cache, reads))
    tokens = Tokens(ids, lengths=counts)
    model = for_rows(model, params.adapter)
    x, cache, report = model.prefill(tokens, slots.cache, by=by)
    # Only the logits of each prompt's last token are computed.
    at = jnp.maximum(counts - 1, 0)[:, None, None]
    last = jnp.take_along_axis(x, at, axis=1)[:, 0]
    # Padding points past the vocabulary: dropped.
    real = jnp.arange(W) < counts[:, None]
    marked = jnp.where(real, ids, model.config.vocabulary)
    seen = slots.seen & ~reads[:, None]
    rows = jnp.arange(B)[:, None]

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(reads.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    slots = slots._replace(
        cache=cache,
        seen=seen.at[rows, marked].set(True, mode="drop"),
        active=slots.active | reads,
        drawn=jnp.where(reads, 0, slots.drawn),
        params=jax.tree.map(chosen, params, slots.params),
    )
    none = jnp.zeros(B, jnp.int32)
    slots, outputs = draw(slots, model.logits(last), reads, none, top=top)
    return slots, outputs, report


def admit(
    model: Decoder,
    slots: Slots,
    row: Int[Array, ""],
    cache: Cache,
    last: Float[Array, "1 D"],
    prompt: Int[Array, " S"],
    params: SamplingParams,
    *,
    strategy: DecodeStrategy,
    top: int,
) -> tuple[Slots, Outputs]:
    """Puts a request into a slot and draws its first token.

    Args:
      cache, last: cache and last output of its full prompt, from `read_piece`.
      prompt: its tokens, padded with V, which is not a token.
    """
    seen = jnp.zeros((1, model.config.vocabulary), bool)
    seen = seen.at[0, prompt].set(True, mode="drop")
    # The request as slots of one row, so that its first token is drawn as all others.
    zero = jnp.zeros(1, jnp.int32)
    admitted = Slots(None, None, zero, seen, jnp.ones(1, bool), zero, params)
    every = jnp.full(1, strategy.loops(model), jnp.int32)
    admitted, outputs = draw(
        admitted, model.logits(last), admitted.active, every, top=top
    )
    length = jnp.sum(prompt < model.config.vocabulary, dtype=jnp.int32)
    cache, depth = strategy.put(
        model, slots, row, cache, length=length, limit=params.limit[0]
    )

    def put(rows: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(rows, part, row, 0)

    # Everything else counts rows on its first axis.
    rest = jax.tree.map(put, slots._replace(cache=None, depth=None), admitted)
    return rest._replace(cache=cache, depth=depth), outputs


def decode_slots(
    model: Decoder,
    weights: Any,
    slots: Slots,
    ended: Bool[Array, " B"],
    until_free: Bool[Array, ""],
    *,
    strategy: DecodeStrategy,
    steps: int,
    top: int,
) -> tuple[Slots, Outputs, Int[Array, ""]]:
    """Runs up to `steps` steps of all active slots.

    Args:
      weights: `strategy.weights(model)`.
      ended: slots whose request the host has ended.
      until_free: return as soon as a slot has become free, for somebody waits for one.

    Returns:
      The slots, what they drew, and how many steps that took.
    """
    model = for_rows(model, slots.params.adapter)
    # Stop strings and cancellations are known to the host only.
    slots = slots._replace(active=slots.active & ~ended)
    before = slots.active
    rows, width = slots.newest.shape[0], strategy.most_tokens
    outputs = _no_outputs(rows, steps * width, _logits_dtype(model), top=top)

    def goes_on(carry) -> Bool[Array, ""]:
        # Stop early if no slot is active, or if one is free for a waiting request.
        n, slots, _ = carry
        freed = jnp.any(before & ~slots.active)
        return (n < steps) & jnp.any(slots.active) & ~(until_free & freed)

    def step(carry):
        n, slots, outputs = carry
        slots, new = strategy.step(model, weights, slots, top=top)

        def put(columns: Array, step: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(columns, step, n * width, 1)

        return n + 1, slots, jax.tree.map(put, outputs, new)

    start = (jnp.zeros((), jnp.int32), slots, outputs)
    n, slots, outputs = jax.lax.while_loop(goes_on, step, start)
    return slots, outputs, n


def draw(
    slots: Slots,
    logits: Float[Array, "B V"],
    who: Bool[Array, " B"],
    loops: Int[Array, " B"],
    *,
    top: int,
    draft: Draft | None = None,
) -> tuple[Slots, Outputs]:
    """Draws a token for each slot in `who`; `Outputs` with N = 1.

    Args:
      who: slots whose token has come to its end; they are active.
      loops: loops that it has run.
      draft: see `sample`.
    """
    params = slots.params
    sampling = _sampling_of(params, who)
    ids = draw_ids(logits, _keys(params), slots.drawn, slots.seen, sampling, draft)
    outputs = _with_logprobs(logits, ids, who & params.logprobs, top=top)
    rows = jnp.arange(ids.shape[0])
    # A token past the vocabulary is dropped: nothing was drawn.
    written = jnp.where(who & (ids != NOT_FINITE), ids, logits.shape[-1])
    drawn = slots.drawn + who
    # The mark of logits that are not finite ends a request too.
    stopped = (ids[:, None] == params.stops).any(-1) | (ids == NOT_FINITE)
    ends = who & (stopped | (drawn >= params.limit))
    slots = slots._replace(
        newest=jnp.where(who, ids, slots.newest),
        seen=slots.seen.at[rows, written].set(True, mode="drop"),
        active=slots.active & ~ends,
        drawn=drawn,
    )
    outputs = outputs._replace(
        tokens=jnp.where(who, ids, NO_TOKEN), loops=jnp.where(who, loops, 0)
    )
    return slots, jax.tree.map(lambda leaf: leaf[:, None], outputs)


def _keys(params: SamplingParams) -> Key[Array, " B"]:
    """Returns the streams of `row_keys`."""
    keys = jax.vmap(jax.random.key)(params.seed)
    return jax.vmap(jax.random.fold_in)(keys, params.stream)


def _sampling_of(params: SamplingParams, who: Bool[Array, " B"]) -> RowSampling:
    """Returns the settings with those of other slots greedy, which cost nothing."""
    quiet = RowSampling(*(jnp.asarray(x) for x in sampling_rows([_GREEDY])))
    return jax.tree.map(
        lambda row, none: jnp.where(who, row, none), params.sampling, quiet
    )


_GREEDY = type(PLAIN)(temperature=0.0)


def _with_logprobs(
    logits: Float[Array, "B V"],
    ids: Int[Array, " B"],
    requested: Bool[Array, " B"],
    *,
    top: int,
) -> Outputs:
    def tell() -> tuple[Array, Array, Array]:
        sums = reductions.logsumexp(logits, keepdims=True)
        chosen = (
            jnp.take_along_axis(logits, jnp.maximum(ids, 0)[:, None], axis=-1) - sums
        )
        values, best = jax.lax.top_k(logits, top) if top else _none(logits)
        return chosen[:, 0], best.astype(jnp.int32), values - sums

    # Without requested logprobs, skip the logarithms of V numbers.
    def silent() -> tuple[Array, Array, Array]:
        outputs = _no_outputs(ids.shape[0], 1, logits.dtype, top=top)
        none = jax.tree.map(lambda x: x[:, 0], outputs)
        return none.logprobs, none.top, none.top_logprobs

    return Outputs(ids, ids, *jax.lax.cond(jnp.any(requested), tell, silent))


def _no_outputs(rows: int, steps: int, dtype: Any, *, top: int) -> Outputs:
    best = jnp.zeros((rows, steps, top), jnp.int32)
    return Outputs(
        tokens=jnp.full((rows, steps), NO_TOKEN, jnp.int32),
        loops=jnp.zeros((rows, steps), jnp.int32),
        logprobs=jnp.zeros((rows, steps), dtype),
        top=best,
        top_logprobs=best.astype(dtype),
    )


def _logits_dtype(model: Decoder) -> Any:
    return jnp.promote_types(model.config.dtype, jnp.float32)


def _none(wide: Array) -> tuple[Array, Array]:
    empty = jnp.zeros((wide.shape[0], 0), wide.dtype)
    return empty, empty.astype(jnp.int32)
