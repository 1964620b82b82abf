"""One queue of requests on a looped block: batched over sequences, and over depth.

A policy is how an engine's slots move on. `static`: as many requests as there are
slots, and the next ones when all have ended. `sequence`: a slot is filled when it is
free; a step runs all R loops and one head. `propagate`, `share`, `skip`, `verify`: a
step is one pass of the block over slots at mixed loops. `full`: `sequence` of the
Transformer of as many layers. For each it prints the speed relative to `sequence`, and
its bound:

    bound = (R p + h) / (e (p + h + m))

p is one pass of the block, h the final norm and the head, m the keys and values that
tokens which leave lack, each timed in the same run on as many rows as a step of the
policy has; e is the mean of loops that made a token. The paper calculates with h and m
free, which leaves R / e.

The models are trained for a moment on this package's own source, byte by byte, so that
rules have something to be sure of.

    python experiments/relaxed_recursive_transformer/engine_over_depth.py --repeats 10
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import recurjax
from recurjax.bench.relaxed_recursive_transformer import transformer
from recurjax.bench.report import show, write
from recurjax.bench.timing import BenchRow, in_turns
from recurjax.bench.training_step import BenchedRun, one_device_step
from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.exits import ExitRule, exits_of
from recurjax.inference.compute_dtype import cache_dtype
from recurjax.inference.engine import Engine, EngineConfig, RequestSettings
from recurjax.inference.engine.slots import NO_TOKEN, DecodeStrategy, Slots, empty_slots
from recurjax.inference.engine.strategy import choose_strategy
from recurjax.inference.sampling import SamplingConfig
from recurjax.machine import host
from recurjax.model import Decoder, ModelConfig, StackConfig
from recurjax.ranges import PositiveInt, RangeChecks
from recurjax.training.objective import Exits, NextToken, Objective
from recurjax.training.optimizers import AdamW
from recurjax.types import Array, Batch, LoopPositions, Tokens
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)

Dtype = Literal["float32", "bfloat16"]
Policy = Literal["static", "sequence", "full", "propagate", "share", "skip", "verify"]
POLICIES: tuple[Policy, ...] = (
    "static",
    "sequence",
    "full",
    "propagate",
    "share",
    "skip",
    "verify",
)

REQUESTS = 256
SMALL = {"B": 16, "T": 16, "D": 128, "L": 6, "R": 3, "V": 257, "steps": 300}
"""B slots, prompts of T tokens, R loops, and steps of training; for two CPU cores."""

LARGE = {"B": 64, "T": 256, "D": 1024, "L": 12, "R": 3, "V": 4096, "steps": 1000}
"""For one accelerator."""

LEAST, MOST = 16, 256
"""New tokens of a request."""

RULE = ExitRule(kind="confidence", threshold=0.7)
RANK = 8
_TRAINED_ROWS, _TRAINED_LENGTH = 16, 128
_NAME = "relaxed_recursive_transformer"
_GREEDY = SamplingConfig(temperature=0.0)  # `verify` is for greedy texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(RangeChecks):
    """Times a queue of requests under each policy, on the first device.

    Attributes:
      json: also write the rows to this file.
      large: the shapes of one accelerator; otherwise those of two CPU cores.
      dtype: dtype of activations and matrix products.
      repeats: timed calls of each part; the queue runs a fifth as often, at least once.
      requests: in the queue.
      slots: slots of each engine; None: the shape's.
    """

    json: Path | None = None
    large: bool = False
    dtype: Dtype = "float32"
    repeats: PositiveInt = 10
    requests: PositiveInt = REQUESTS
    slots: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRow(BenchRow):
    """A queue's time under one policy; tokens per second are the new ones.

    Attributes:
      figures: step_ms: the queue's time over its steps, prompts and host included.
        loops: e. rows_a_token: rows of block passes, those of free slots too, over the
        tokens that steps made. bits_a_byte: of a held-out text, given token by token.
        speedup: over `sequence`, of minima. bound, of_bound, paper: see the module.
        pass_ms, head_ms, missing_ms: p, h and m.
    """

    figures: Mapping[str, float]


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints a table and a line for each policy."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="engine_over_depth.py")
    # Before an hour of measurements that could not be kept.
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json: there is no directory {options.json.parent}")
    measured = list(rows(options))
    show(measured, Console(width=120))
    print(summary(measured))
    if options.json is not None:
        write(measured, options.json)
    return 0


def rows(options: Options) -> Iterator[ServedRow]:
    """Runs the queue on an engine of each policy, in turns of one process."""
    dtype, repeats, requests = options.dtype, options.repeats, options.requests
    shape = LARGE if options.large else SMALL
    if options.slots is not None:
        shape = shape | {"B": options.slots}
    text, held_out = _source()
    per_loop, first, full = stacks(shape)
    # Every loop learns to predict: rules look at what it says.
    exits = Exits(weights="weighted")
    models = {
        name: _trained(_model(stack, shape, dtype), shape, text, objective)
        for name, stack, objective in (
            ("per_loop", per_loop, exits),
            ("first", first, exits),
            ("full", full, NextToken()),
        )
    }
    of: dict[Policy, str] = {"share": "first", "full": "full"}
    engines: dict[Policy, Engine] = {
        policy: Engine(models[of.get(policy, "per_loop")], _sizes(policy, shape))
        for policy in POLICIES
        if policy != "static"
    }
    # The same engine, with the requests in another order.
    engines = {"static": engines["sequence"], **engines}
    queue = draw_queue(shape, held_out, requests)
    seconds, counted = _in_turns(engines, queue, rounds=max(1, repeats // 5))
    # All parts in turns too, so that what slows the machine slows each.
    R, B = shape["R"], shape["B"]
    parts = time_parts(models["per_loop"], {B, R * B}, _length(shape), repeats=repeats)
    figures = {}
    for policy, engine in engines.items():
        model = models[of.get(policy, "per_loop")]
        rows_, over_depth = B, engine.config.exit is not None
        if policy == "verify":
            rows_ *= R  # a lane for each loop
        at, count = parts[rows_], counted[policy]
        e = float(R)
        if over_depth:
            exits = count.exits
            e = sum(n * exits[n] for n in exits) / sum(exits.values())
        m = at.missing if policy == "propagate" else 0.0
        # A step of `sequence` has R passes, a tick one.
        bound, paper, passes = 1.0, 1.0, R
        if over_depth:
            ours = R * parts[B].block + parts[B].head
            bound, paper = ours / (e * (at.block + at.head + m)), R / e
            passes = 1
        speedup = min(seconds["sequence"]) / min(seconds[policy])
        # `verify` says what the full model does.
        config = _sizes("sequence" if policy == "verify" else policy, shape)
        strategy = choose_strategy(model, config, None)
        figures[policy] = {
            "step_ms": 1e3 * statistics.median(seconds[policy]) / count.steps,
            "loops": e,
            "rows_a_token": passes * rows_ * count.steps / (count.tokens - requests),
            "bits_a_byte": held_out_bits(model, strategy, held_out, shape),
            "speedup": speedup,
            "bound": bound,
            "of_bound": speedup / bound,
            "paper": paper,
            "pass_ms": 1e3 * at.block,
            "head_ms": 1e3 * at.head,
            "missing_ms": 1e3 * m,
        }
    for policy in POLICIES:
        times = seconds[policy]
        median = statistics.median(times)
        yield ServedRow(
            name=f"{_NAME}/engine_{policy}/serve",
            shape=shape | {"requests": requests},
            dtype=dtype,
            median_ms=1e3 * median,
            min_ms=1e3 * min(times),
            tokens_per_s=counted[policy].tokens / median,
            figures=figures[policy],
        )


def summary(rows: list[ServedRow]) -> str:
    """Reports each policy's speed relative to `sequence` and to its bound."""
    lines = []
    for row in rows:
        f = row.figures
        lines.append(
            f"{row.name.split('/')[1].removeprefix('engine_')}: {f['speedup']:.2f} "
            f"times sequence, bound {f['bound']:.2f} (reached {f['of_bound']:.0%}), "
            f"the paper's calculation {f['paper']:.2f}; {f['step_ms']:.2f} ms a step, "
            f"{f['loops']:.2f} loops and {f['rows_a_token']:.2f} rows per token, "
            f"{f['bits_a_byte']:.3f} bits per byte"
        )
    return "\n".join(lines)


def stacks(
    shape: Mapping[str, int],
) -> tuple[StackConfig, StackConfig, StackConfig]:
    """Returns the looped block, the same on loop 1's keys, and the Transformer."""
    base = transformer(shape)
    looped = partial(
        RelaxedRecursiveTransformerConfig,
        transformer=base,
        loops=shape["R"],
        rank=RANK,
    )
    return looped(), looped(loop_cache="first"), base


class QueuedRequest(NamedTuple):
    """A request of the queue."""

    prompt: np.ndarray
    settings: RequestSettings


def draw_queue(
    shape: Mapping[str, int], text: np.ndarray, requests: int
) -> list[QueuedRequest]:
    """Draws positions of a text to continue from, and lengths of continuations."""
    draw = np.random.default_rng(0)
    T, queue = shape["T"], []
    for _ in range(requests):
        at = int(draw.integers(len(text) - T))
        settings = RequestSettings(
            max_new_tokens=int(draw.integers(LEAST, MOST + 1)), sampling=_GREEDY
        )
        queue.append(QueuedRequest(text[at : at + T], settings))
    return queue


def held_out_bits(
    model: Decoder, strategy: DecodeStrategy, text: np.ndarray, shape: Mapping[str, int]
) -> float:
    """Counts bits per byte of a text that is given to the slots token by token.

    The strategy's own steps run, with exits by their rule and what they do about
    missing keys; of each place the probability of the text's token is taken.
    """
    B, length = shape["B"], _length(shape)
    rows_ = np.array([text[n * length : (n + 1) * length] for n in range(B)])
    return float(_forced_bits(model, rows_, strategy=strategy))


@partial(jax.jit, static_argnames="strategy")
def _forced_bits(model: Decoder, texts: Array, *, strategy: DecodeStrategy) -> Array:
    B, P = texts.shape
    vocabulary = model.config.vocabulary
    slots = empty_slots(model, strategy=strategy, rows=B, length=P)
    params = slots.params._replace(
        # Without an end: a row stops when its text does.
        limit=jnp.full(B, jnp.iinfo(jnp.int32).max),
        logprobs=jnp.ones(B, bool),
        threshold=jnp.full(B, RULE.threshold),
    )
    slots = slots._replace(
        newest=jnp.asarray(texts[:, 0]), active=jnp.ones(B, bool), params=params
    )
    weights, every = strategy.weights(model), jnp.arange(B)

    def step(carry: tuple[Slots, Array]) -> tuple[Slots, Array]:
        slots, nats = carry
        # Probabilities of all tokens, whichever was drawn.
        slots, outputs = strategy.step(model, weights, slots, top=vocabulary)
        drew = outputs.tokens[:, 0] != NO_TOKEN
        target = texts[every, jnp.minimum(slots.drawn, P - 1)]
        is_given = outputs.top[:, 0] == target[:, None]
        logprobs = jnp.where(is_given, outputs.top_logprobs[:, 0], 0).sum(-1)
        # Another token than the drawn one is read next.
        slots = slots._replace(
            newest=jnp.where(drew, target, slots.newest),
            active=slots.active & (slots.drawn < P - 1),
        )
        return slots, nats - jnp.where(drew, logprobs, 0).sum()

    _, nats = jax.lax.while_loop(
        lambda carry: carry[0].active.any(), step, (slots, jnp.zeros(()))
    )
    return nats / math.log(2) / (B * (P - 1))


class _Counted(NamedTuple):
    tokens: int
    steps: int
    exits: dict[int, int]


def _in_turns(
    engines: Mapping[Policy, Engine], queue: list[QueuedRequest], *, rounds: int
) -> tuple[dict[Policy, list[float]], dict[Policy, _Counted]]:
    seconds: dict[Policy, list[float]] = {policy: [] for policy in engines}
    counted = {}
    for engine in engines.values():
        _serve(engine, queue[: engine.slots], static=False)  # not timed
    for _ in range(rounds):
        for policy, engine in engines.items():
            before = engine.counts
            tokens, steps, exits = before.new_tokens, before.steps, {**before.exits}
            began = time.perf_counter()
            _serve(engine, queue, static=policy == "static")
            seconds[policy].append(time.perf_counter() - began)
            counts = engine.counts
            # The same in each round: a request's tokens do not depend on others.
            counted[policy] = _Counted(
                counts.new_tokens - tokens,
                counts.steps - steps,
                {n: counts.exits[n] - exits[n] for n in exits},
            )
    return seconds, counted


def _serve(engine: Engine, queue: list[QueuedRequest], *, static: bool) -> None:
    size = engine.slots if static else len(queue)
    for start in range(0, len(queue), size):
        for prompt, settings in queue[start : start + size]:
            engine.submit(prompt, settings)
        while engine.busy:
            engine.step()


def _trained(
    config: ModelConfig,
    shape: Mapping[str, int],
    text: np.ndarray,
    objective: Objective,
) -> Decoder:
    run = BenchedRun(
        model=config,
        optimizer=AdamW(learning_rate=3e-3),
        batch=_TRAINED_ROWS,
        length=_TRAINED_LENGTH,
        objective=objective,
        clip=1.0,
    )
    step, draw = one_device_step(run), np.random.default_rng(1)
    state = step.initialise(jax.random.key(0))
    for _ in range(shape["steps"]):
        at = draw.integers(len(text) - _TRAINED_LENGTH, size=_TRAINED_ROWS)
        ids = jnp.asarray([text[n : n + _TRAINED_LENGTH + 1] for n in at])
        state, _ = step(state, Batch(ids[:, :-1], ids[:, 1:]), None)
    return state.model


def _sizes(policy: Policy, shape: Mapping[str, int]) -> EngineConfig:
    over_depth = ("propagate", "share", "skip", "verify")
    missing = policy if policy in over_depth else None
    return EngineConfig(
        slots=shape["B"],
        length=_length(shape),
        prefill_tokens=shape["T"],
        exit=None if missing is None else RULE,
        missing=missing,
    )


def _length(shape: Mapping[str, int]) -> int:
    return shape["T"] + MOST


def _source() -> tuple[np.ndarray, np.ndarray]:
    """Returns this package's source as bytes: nine tenths, and the last."""
    files = sorted(Path(recurjax.__file__).parent.rglob("*.py"))
    text = np.frombuffer(b"".join(map(Path.read_bytes, files)), np.uint8)
    cut = len(text) * 9 // 10
    return text[:cut].astype(np.int32), text[cut:].astype(np.int32)


def _model(stack: StackConfig, shape: Mapping[str, int], dtype: Dtype) -> ModelConfig:
    return ModelConfig(vocabulary=shape["V"], dtype=dtype, stack=stack)


class Parts(NamedTuple):
    """Seconds of the parts of a step, on a number of rows: p, h and m."""

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


if __name__ == "__main__":
    host.prepare()  # as the command line, whose figures these are compared with
    run_script(main)
