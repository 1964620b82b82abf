"""Times what a step of a looped block's engine is made of."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurjax.bench.timing import in_turns
from recurjax.exits import exits_of
from recurjax.inference.compute_dtype import cache_dtype
from recurjax.model import Decoder
from recurjax.types import Array, LoopPositions, Tokens


class Parts(NamedTuple):
    """Seconds of what a step is made of, on so many rows: p, h and m."""

    block: float
    head: float
    missing: float


def time_parts(
    model: Decoder, row_counts: set[int], length: int, *, repeats: int
) -> dict[int, Parts]:
    """Times a plain pass of the block, the head, and what propagates, in turns."""
    exits = exits_of(model).exits
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for rows_ in row_counts:
        calls["loops", rows_] = _loops(model, rows_, length)
        calls["head", rows_] = _head(model, rows_)
        calls["missing", rows_] = _missing(model, rows_, length)
    # They take milliseconds at most.
    times = in_turns(calls, repeats=10 * repeats)
    least = {name: min(turns) for name, turns in times.items()}
    return {
        rows_: Parts(
            least["loops", rows_] / exits,
            least["head", rows_],
            least["missing", rows_],
        )
        for rows_ in row_counts
    }


def _loops(model: Decoder, rows_: int, length: int) -> Callable[[], Any]:
    @partial(jax.jit, donate_argnums=2)
    def run(model: Decoder, x: Array, cache: Any) -> Any:
        return model.stack(x, cache, Tokens(jnp.zeros((rows_, 1), jnp.int32)))

    x = _states(model, rows_)
    held = [model.init_cache(rows_, length, cache_dtype(model))]

    def call() -> Array:
        y, held[0] = run(model, x, held[0])
        return y

    return call


def _head(model: Decoder, rows_: int) -> Callable[[], Any]:
    run = jax.jit(lambda model, x: model.logits(model.final_norm(x)))
    return partial(run, model, _states(model, rows_))


def _missing(model: Decoder, rows_: int, length: int) -> Callable[[], Any]:
    weights = jax.jit(lambda model: exits_of(model).tick_weights())(model)
    lanes = LoopPositions(
        loop=jnp.zeros((rows_, 1), jnp.int32),
        position=jnp.full((rows_, 1), length // 2),
        live=jnp.ones((rows_, 1), bool),
    )

    @partial(jax.jit, donate_argnums=2)
    def run(model: Decoder, x: Array, cache: Any, weights: Any) -> Any:
        return exits_of(model).fill_ticks(x, lanes, cache, weights)

    x = _states(model, rows_)
    held = [exits_of(model).init_ticks(rows_, length, cache_dtype(model))]

    def call() -> Any:
        held[0] = run(model, x, held[0], weights)
        return held[0].keys[0]

    return call


def _states(model: Decoder, rows_: int) -> Array:
    return jnp.ones((rows_, 1, model.config.stack.width), model.config.dtype)
