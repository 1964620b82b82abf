"""Times a looped block against the Transformer of as many layers."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from recurjax.bench.timing import BenchRow, in_turns, repeat, row
from recurjax.bench.training_step import (
    BenchedRun,
    one_device_step,
    random_batch,
    step_row,
)
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.losses.divergence import FrozenModel
from recurjax.model import Decoder, ModelConfig, StackConfig
from recurjax.training.objective import Distilled, NextToken
from recurjax.training.optimizers import AdamW
from recurjax.types import Batch, Tokens
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

Dtype = Literal["float32", "bfloat16"]

SMALL = {"B": 2, "T": 128, "D": 512, "L": 6, "V": 4096}
"""Six layers, so that two loops and three divide them, for two CPU cores."""

LARGE = {"B": 16, "T": 2048, "D": 1024, "L": 12, "V": 32768}
"""A 12-layer model of width 1,024, for one accelerator."""

RANK = 64
TURNS = 4
"""Rounds of decoding per repeat, because a token takes only milliseconds."""

_NAME = "relaxed_recursive_transformer"


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Measures every row; tokens are decoded in turns, one of each model.

    The shape of a training step has the bytes of the parameters and of the optimizer.
    """
    shape = LARGE if large else SMALL
    for name, stack in stacks(shape).items():
        config = _model(stack, shape, dtype)
        yield from _training(name, config, shape, dtype, repeats)
    tokens = shape | {"T": 1, "S": shape["T"]}
    steps = {
        name: _decoder(_model(stack, shape, dtype), shape)
        for name, stack in stacks(shape).items()
    }
    for name, times in in_turns(steps, repeats=TURNS * repeats).items():
        yield row(f"{_NAME}/{name}/decode", tokens, dtype, times, tokens=shape["B"])


def summary(rows: list[BenchRow]) -> str:
    """Compares each model with the Transformer, by minima."""
    times = {row.name.removeprefix(f"{_NAME}/"): row.min_ms for row in rows}
    parts = []
    for what in dict.fromkeys(name.partition("/")[2] for name in times):
        base = times[f"transformer/{what}"]
        ratios = [
            f"{name} {times[f'{name}/{what}'] / base:.2f}"
            for name in ("recursive2", "recursive3", "rank64")
            if f"{name}/{what}" in times
        ]
        parts.append(f"{what}: {', '.join(ratios)}")
    return "over the Transformer's time, " + "; ".join(parts)


def transformer(shape: Mapping[str, int]) -> TransformerConfig:
    """Returns the stack that is looped: of shape's L layers, of width D."""
    L, D = shape["L"], shape["D"]
    heads = max(1, D // 64)
    return TransformerConfig(
        layers=L,
        width=D,
        attention=AttentionConfig(heads=heads, key_heads=heads, head_width=D // heads),
        mlp=MlpConfig(kind="relu_squared", width=4 * D),
    )


def stacks(shape: dict[str, int]) -> dict[str, StackConfig]:
    """Returns what is compared: a Transformer, two loops, three, two with additions."""
    base = transformer(shape)
    loop = partial(RelaxedRecursiveTransformerConfig, transformer=base)
    return {
        "transformer": base,
        "recursive2": loop(loops=2),
        "recursive3": loop(loops=3),
        "rank64": loop(loops=2, rank=RANK),
    }


def _training(
    name: str, config: ModelConfig, shape: dict[str, int], dtype: Dtype, repeats: int
) -> Iterator[BenchRow]:
    """Forward, gradient, a step, and a step with the Transformer for a teacher."""
    B, T = shape["B"], shape["T"]
    teacher = _model(stacks(shape)["transformer"], shape, dtype)
    run = partial(
        BenchedRun, model=config, optimizer=AdamW(learning_rate=1e-3), batch=B, length=T
    )
    plain = run(clip=1.0)
    step, batch = one_device_step(plain), random_batch(plain)
    state = step.initialise(jax.random.key(0))
    sizes = shape | {
        "parameter_bytes": _bytes(state.model),
        "optimizer_bytes": _bytes(state.optimizer),
    }

    @jax.jit
    def forward(model: Decoder, batch: Batch) -> jax.Array:
        return model(Tokens(batch.ids), model.init_cache(B, 0))[0]

    gradient = jax.jit(jax.grad(NextToken(), has_aux=True))
    for what, program in (("forward", forward), ("forward_backward", gradient)):
        times = repeat(partial(program, state.model, batch), repeats=repeats)
        yield row(f"{_NAME}/{name}/{what}", shape, dtype, times, tokens=B * T)
    timed = {"dtype": dtype, "repeats": repeats, "shape": sizes}
    yield step_row(f"{_NAME}/{name}/train_step", step, state, batch, **timed)
    objective = Distilled(teacher=FrozenModel(run="drawn", model=teacher))
    distilled = one_device_step(run(clip=1.0, objective=objective))
    yield step_row(
        f"{_NAME}/{name}/distilled_step",
        distilled,
        distilled.initialise(jax.random.key(0)),
        batch,
        frozen=_drawn(teacher),
        **timed,
    )


def _decoder(config: ModelConfig, shape: dict[str, int]) -> Callable[[], jax.Array]:
    """Returns a call that reads one more token after T."""
    B, T = shape["B"], shape["T"]
    model, ids = _drawn(config), jnp.ones((B, T), jnp.int32)

    @jax.jit
    def prefill(model: Decoder, ids: jax.Array) -> Any:
        x, cache = model.hidden(Tokens(ids), model.init_cache(B, T + 1024))
        return model.logits(x[:, -1]), cache

    @partial(jax.jit, donate_argnums=2)
    def decode(model: Decoder, ids: jax.Array, cache: Any) -> Any:
        x, cache = model.hidden(Tokens(ids), cache)
        return model.logits(x[:, -1]), cache

    held = [prefill(model, ids)[1]]

    def advance() -> jax.Array:
        logits, held[0] = decode(model, ids[:, :1], held[0])
        return logits

    return advance


def _drawn(config: ModelConfig) -> Decoder:
    return jax.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))()


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _model(stack: StackConfig, shape: dict[str, int], dtype: Dtype) -> ModelConfig:
    return ModelConfig(vocabulary=shape["V"], dtype=dtype, stack=stack)
