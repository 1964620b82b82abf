"""Continues sequences of token ids with any model."""

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, Int32, Key

from pallas_kernels import target
from recurjax.errors import UserError
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.decoding import NOT_FINITE, decode, prefill
from recurjax.inference.exit_decoding import EarlyExit, ExitDecoder, check_exits
from recurjax.inference.sampling import (
    PLAIN,
    SamplingConfig,
    row_keys,
    sampling_rows,
)
from recurjax.inference.timing import Timing
from recurjax.model import Decoder, ModelConfig
from recurjax.ranges import LARGEST_SIZE
from recurjax.sharding import laid_out, replicated
from recurjax.types import Array, Tokens

FinishReason = Literal["eos", "stop", "length"]
"""What ended a row: an EOS token, the caller (a stop string), the token limit."""

CHUNK = 16
"""Tokens a row between two looks at them by the host, where someone waits for them."""

LONG_CHUNK = 64
"""The same where nobody does: each call has a cost of its own."""

_CACHE_STEP = 64
_SMALLEST_BUCKET = 16


class NotFinite(UserError):
    """Logits are NaN or infinite, so that nothing can be drawn from them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGeneration:
    """New tokens of each row, an EOS that ended it included.

    Attributes:
      aux: what the prefill had to report, see `Decoder.prefill`; empty when exact.
      loops: of early exits, how many loops made each token; else None.
    """

    tokens: list[Int32[np.ndarray, " _"]]
    finish_reasons: list[FinishReason]
    timing: Timing
    aux: dict[str, float]
    loops: list[list[int]] | None = None


def generate_tokens(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, " _"]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig = PLAIN,
    eos: int | Collection[int] | None = None,
    seed: int | Key[Array, " B"] = 0,
    on_token: Callable[[int, int], bool] | None = None,
    cache_length: int | None = None,
    chunk: int | None = None,
    prefill_by: str = "exact",
    mesh: Mesh | None = None,
    exits: EarlyExit | None = None,
) -> TokenGeneration:
    """Continues token sequences, all in one batch.

    Each row stands at its own position and draws from its own stream, so that its
    tokens do not depend on the other rows, up to the rounding of matrix products.

    Args:
      max_new_tokens: for each row.
      eos: the token that ends a row, or several of them; None: nothing does.
      seed: row r draws from the stream `row_keys(seed, B)[r]`; or such streams
        themselves: `row_keys(0, 8)[3:4]` makes row 3 of 8 alone.
      on_token: called with the row and each new token; True ends the row after it.
      cache_length: how many tokens a row's cache can hold; None: as many as needed.
      chunk: draws a row in one call of the compiled loop: `on_token` is called this
        seldom, and up to so many tokens are computed in vain after it ends a row.
        None: 16 with `on_token`, else 64.
      prefill_by: "exact", or a way of the variant's own, see `Decoder.prefill`:
        "sweeps:N" reads the prompts of a latent recurrence in N parallel sweeps after
        a first one.
      mesh: that the model lies on; its data and fsdp axes share the rows where they
        divide them, else every device reads all. Each process must be given the same
        prompts and gets all tokens. None: one device.
      exits: let tokens leave a recursive model early, one row after another; the
        prompts are read through all loops.

    Raises:
      UserError: no prompt; an empty one; a prompt and its continuation are longer than
        the model or the cache allows; a token that the model does not have.
      NotFinite: logits are NaN or infinite.
    """
    if chunk is None:
        chunk = LONG_CHUNK if on_token is None else CHUNK
    for name, count in (("max_new_tokens", max_new_tokens), ("chunk", chunk)):
        if count < 1:
            raise UserError(f"{name} must be at least 1, got {count}")
    reason = model.refuses_prefill(prefill_by)
    if reason is not None:
        raise UserError(reason)
    if exits is not None:
        check_exits(model, exits)
        if mesh is not None:
            raise UserError("tokens leave early on one device: ask for no mesh")
    # As wide as they come: an id of another model must not wrap around into range.
    read = [np.asarray(prompt, _id_dtype(prompt)) for prompt in prompts]
    _check_tokens(read, model.config.vocabulary)
    ids = [prompt.astype(np.int32) for prompt in read]
    cache_length = _fitting_cache(ids, max_new_tokens, cache_length, model.config)
    _check_memory(model, len(ids), cache_length)
    # Once for all tokens: the programs below would round the weights anew for each.
    model = in_compute_dtype(model)
    # Prompts are padded to few widths, so that few programs are compiled.
    tokens = _padded(ids, longest=cache_length)
    keys = row_keys(seed, len(ids)) if isinstance(seed, int) else seed
    if keys.shape != (len(ids),):
        raise ValueError(
            f"generate_tokens: wants one key a prompt, got {keys.shape} for {len(ids)}"
        )
    wishes = sampling_rows([sampling] * len(ids))
    tokens, keys, wishes = _on_mesh((tokens, keys, wishes), len(ids), mesh)
    ends = np.atleast_1d(np.asarray([] if eos is None else eos, np.int32))
    # -1 is no token: nothing ends a row.
    streams = (keys, ends if ends.size else np.array([-1], np.int32))
    timing = Timing(rows=len(ids), prompt_tokens=sum(map(len, ids)))
    rows = _Rows(len(ids), max_new_tokens, ends, on_token)

    options = {
        "sampling": wishes,
        "penalizes": sampling.penalizes,
        "cache_length": cache_length,
        "by": prefill_by,
        "mesh": mesh,
    }
    if exits is not None:
        return _with_exits(
            model,
            ids,
            keys,
            jnp.asarray(streams[1]),
            sampling=sampling,
            cache_length=cache_length,
            by=prefill_by,
            exits=exits,
            most=max_new_tokens,
            on_token=on_token,
        )
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        # Compiled apart, so that the reported speed is that of reading.
        with timing.measure("compile"):
            prefill.lower(model, tokens, *streams, **options).compile()
        with timing.measure("prefill"):
            state = prefill(model, tokens, *streams, **options)
            made = np.asarray(state.newest)[:, None]
        aux = {name: float(value) for name, value in state.aux.items()}
        # The first new token comes from the prompts' last positions.
        rows.take(made)

        options = {"sampling": wishes, "chunk": chunk, "mesh": mesh}
        if rows.unfinished:
            with timing.measure("compile"):
                # The limit is an argument: one program serves every number of tokens up
                # to chunk.
                none = np.zeros((), np.int32)
                decode.lower(model, state, *streams, none, **options).compile()
        with timing.measure("decode"):
            while rows.unfinished:
                # The last call draws what is left.
                count = min(chunk, max_new_tokens - rows.drawn)
                limit = np.asarray(count, np.int32)
                state, made = decode(model, state, *streams, limit, **options)
                # Columns from `count` on were not drawn.
                rows.take(np.asarray(made)[:, :count])

    timing.new_tokens = sum(map(len, rows.tokens))
    return TokenGeneration(
        tokens=[np.asarray(row, np.int32) for row in rows.tokens],
        finish_reasons=[reason or "length" for reason in rows.reasons],
        timing=timing,
        aux=aux,
    )


def _on_mesh(tree: Any, rows: int, mesh: Mesh | None) -> Any:
    """Lays arrays of `rows` rows out over a mesh's data and fsdp axes, if they fit."""
    if mesh is None:
        return tree
    divides = rows % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0
    where = NamedSharding(mesh, P(("data", "fsdp"))) if divides else replicated(mesh)
    return jax.tree.map(lambda x: laid_out(x, where), tree)


def _with_exits(
    model: Decoder,
    prompts: list[Int32[np.ndarray, " _"]],
    keys: Key[Array, " B"],
    eos: Int[Array, " M"],
    *,
    sampling: SamplingConfig,
    cache_length: int,
    by: str,
    exits: EarlyExit,
    most: int,
    on_token: Callable[[int, int], bool] | None,
) -> TokenGeneration:
    """Continues one row after another."""
    timing = Timing(rows=len(prompts), prompt_tokens=sum(map(len, prompts)))
    tokens, reasons, loops, ready = [], [], [], False
    for number, prompt in enumerate(prompts):
        own = keys[number : number + 1]
        told = None if on_token is None else partial(_tell_row, on_token, number)
        row, used = _Rows(1, most, np.asarray(eos), told), []
        padded = _padded([prompt], longest=cache_length)
        options = {
            "sampling": sampling_rows([sampling]),
            "penalizes": sampling.penalizes,
            "cache_length": cache_length,
            "by": by,
        }
        with timing.measure("compile"):
            prefill.lower(model, padded, own, eos, **options).compile()
        with timing.measure("prefill"):
            state = prefill(model, padded, own, eos, **options)
            row.take(np.asarray(state.newest)[:, None])
        # The first new token comes of the prompt, which all loops have read.
        used.append(model.stack.exits)  # pyright: ignore[reportAttributeAccessIssue]
        sizes = {"positions": cache_length, "prompt": len(prompt)}
        decoder = ExitDecoder(model, exits, **sizes, sampling=sampling)
        if row.unfinished and not ready:
            with timing.measure("compile"):
                decoder.compile(state, own, eos)
            ready = True  # all rows' steps are the same programs
        with timing.measure("decode"):
            while row.unfinished:
                state, leaving = decoder.step(state, own, eos)
                used.append(leaving.loops)
                row.take(np.asarray(state.newest)[:, None])
        tokens.append(np.asarray(row.tokens[0], np.int32))
        reasons.append(row.reasons[0] or "length")
        loops.append(used)
    timing.new_tokens = sum(map(len, tokens))
    later = [n for row in loops for n in row[1:]]  # the first is made by the prefill
    aux = {"mean loops a token": float(np.mean(later))} if later else {}
    return TokenGeneration(
        tokens=tokens, finish_reasons=reasons, timing=timing, aux=aux, loops=loops
    )


def _tell_row(on_token: Callable[[int, int], bool], row: int, _: int, token: int):
    return on_token(row, token)


class _Rows:
    """The host's account of the rows: their tokens, and which have ended."""

    def __init__(self, count: int, most: int, eos: Int[np.ndarray, " M"], on_token):
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.reasons: list[FinishReason | None] = [None] * count
        self.drawn = 0
        self._most, self._on_token = most, on_token
        self._eos = frozenset(eos.tolist())

    @property
    def unfinished(self) -> bool:
        """Whether any row goes on."""
        return self.drawn < self._most and None in self.reasons

    def take(self, made: Int[np.ndarray, "B N"]) -> None:
        """Adds the next tokens; what a row drew after its end is dropped."""
        # `drawn` counts per row: all rows draw in step.
        self.drawn += made.shape[1]
        for row, column in enumerate(made.tolist()):
            for token in column:
                if self.reasons[row] is None:
                    self._take_one(row, token)

    def _take_one(self, row: int, token: int) -> None:
        # A compiled loop cannot raise: it hands out this id where no token can be.
        if token == NOT_FINITE:
            raise NotFinite(
                f"the model's logits are not finite at new token "
                f"{len(self.tokens[row]) + 1} of prompt {row + 1}: its parameters hold "
                "NaN or infinities, or its activations overflow; take a checkpoint "
                "from before it diverged"
            )
        self.tokens[row].append(token)
        # The caller sees every token, EOS too, before it is decided whether a row ends.
        stopped = self._on_token is not None and self._on_token(row, token)
        if token in self._eos:
            self.reasons[row] = "eos"
        elif stopped:
            self.reasons[row] = "stop"


def _id_dtype(prompt: Sequence[int] | Int[np.ndarray, " _"]) -> Any:
    """Returns a dtype that ids fit into also when they are no token's."""
    if isinstance(prompt, np.ndarray):
        return prompt.dtype
    return np.int64 if all(abs(i) < 2**63 for i in prompt) else object


def _check_memory(model: Decoder, rows: int, length: int) -> None:
    """Refuses a cache that this machine cannot hold, before it is asked for.

    Of an accelerator XLA says so itself; a host's memory is promised and then taken by
    ending the process.
    """
    if length > LARGEST_SIZE:
        raise UserError(
            f"prompt and new tokens take {length} positions, more than {LARGEST_SIZE}: "
            "ask for fewer new tokens"
        )
    if not target.shares_host_memory():
        return
    # As shapes only: nothing is allocated by asking.
    cache = jax.eval_shape(lambda: model.init_cache(rows, length, model.config.dtype))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    # All memory, and not what is free now: others may give theirs back.
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise UserError(
            f"{rows} prompts of up to {length} positions need a cache of "
            f"{needed / 2**30:,.0f} GiB, this machine has {there / 2**30:,.0f}: ask "
            "for fewer new tokens or prompts at a time"
        )


def _check_tokens(prompts: list[np.ndarray], vocabulary: int) -> None:
    if not prompts:
        raise UserError("there is no prompt: give at least one")
    for row, ids in enumerate(prompts):
        if ids.size == 0:
            raise UserError(f"prompt {row + 1} has no tokens: give it at least one")
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise UserError(
                f"prompt {row + 1} has tokens from {ids.min()} to {ids.max()}, the "
                f"model knows 0 to {vocabulary - 1}: use the tokenizer it was trained "
                "with"
            )


def _fitting_cache(
    prompts: list[Int32[np.ndarray, " _"]],
    max_new_tokens: int,
    cache_length: int | None,
    config: ModelConfig,
) -> int:
    """Returns the cache's length; the last new token is never read, so not counted."""
    sizes = [len(ids) for ids in prompts]
    row, longest = max(enumerate(sizes), key=lambda pair: pair[1])
    needed = longest + max_new_tokens - 1
    limits = {"cache": cache_length, "model": config.max_length}
    for name, limit in limits.items():
        if limit is not None and needed > limit:
            raise UserError(
                f"prompt {row + 1} has {longest} tokens and needs {needed} positions "
                f"for {max_new_tokens} new ones, but the {name} has only {limit}: "
                "shorten the prompt or ask for fewer new tokens"
            )
    # In steps, so that a few more new tokens do not compile another program.
    return cache_length or rounded_length(needed, config.max_length)


def rounded_length(needed: int, most: int | None) -> int:
    """Returns a cache's length for so many positions: few lengths are compiled."""
    rounded = -(-needed // _CACHE_STEP) * _CACHE_STEP
    return min(rounded, most or rounded)


def _padded(prompts: list[Int32[np.ndarray, " _"]], *, longest: int) -> Tokens:
    """Pads on the right to a power of two, so that few lengths are compiled."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    bucket = max(_SMALLEST_BUCKET, 1 << (int(lengths.max()) - 1).bit_length())
    padded = np.zeros((len(prompts), min(bucket, longest)), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    return Tokens(jnp.asarray(padded), lengths=jnp.asarray(lengths))
