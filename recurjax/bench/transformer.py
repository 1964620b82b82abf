"""The baseline's rows: forward, gradient, training step, prefill, decode."""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from recurjax.bench.timing import BenchRow, repeat, row
from recurjax.bench.training_step import (
    BenchedRun,
    one_device_step,
    random_batch,
    step_row,
)
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.model import Decoder, ModelConfig
from recurjax.training.objective import NextToken
from recurjax.training.optimizers import AdamW
from recurjax.types import Batch, Cache, Tokens
from recurjax.variants.transformer import TransformerConfig

Dtype = Literal["float32", "bfloat16"]

SMALL = {"B": 8, "T": 256, "D": 256, "L": 4, "V": 4096}
"""The depth-4, width-256 model of nanochat's speed test, for two CPU cores."""

LARGE = {"B": 16, "T": 2048, "D": 768, "L": 12, "V": 32768}
"""A 12-layer model of width 768, for one accelerator."""

_PREFIX = 512


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Measures every row of this variant."""
    shape = LARGE if large else SMALL
    config = _model(shape, dtype)
    run = BenchedRun(
        model=config,
        optimizer=AdamW(learning_rate=1e-3),
        batch=shape["B"],
        length=shape["T"],
        clip=1.0,
    )
    step = one_device_step(run)
    state = step.initialise(jax.random.key(0))
    batch = random_batch(run)
    tokens = shape["B"] * shape["T"]
    measure = partial(_measure, shape=shape, dtype=dtype, repeats=repeats)

    @jax.jit
    def forward(model: Decoder, batch: Batch) -> jax.Array:
        return model(Tokens(batch.ids), model.init_cache(batch.ids.shape[0], 0))[0]

    gradient = jax.jit(jax.grad(NextToken(), has_aux=True))
    name = "transformer/attention"
    yield measure(f"{name}/forward", forward, state.model, batch, tokens=tokens)
    yield measure(
        f"{name}/forward_backward", gradient, state.model, batch, tokens=tokens
    )
    # Before the training step's row, which uses the parameters up.
    yield from _decoding(state.model, shape, dtype, repeats)

    yield step_row(
        f"{name}/train_step",
        step,
        state,
        batch,
        shape=shape,
        dtype=dtype,
        repeats=repeats,
    )


def summary(rows: list[BenchRow]) -> str:
    """Returns how much the cache saves."""
    times = {row.name: row.min_ms for row in rows}
    ratio = (
        times["transformer/rerun_prefix/decode"] / times["transformer/attention/decode"]
    )
    return f"a token at position {_PREFIX}: {ratio:.1f} times faster with the cache"


def _decoding(
    model: Decoder, shape: dict[str, int], dtype: str, repeats: int
) -> Iterator[BenchRow]:
    """One more token after 512: with the cache, and by running the prefix again."""
    B = shape["B"]
    sizes = shape | {"T": 1, "S": _PREFIX}
    ids = jnp.ones((B, _PREFIX), jnp.int32)

    @jax.jit
    # 64 places for the decoded tokens after the prompt.
    def prefill(model: Decoder, ids: jax.Array) -> tuple[jax.Array, Cache]:
        x, cache = model.hidden(Tokens(ids), model.init_cache(B, _PREFIX + 64))
        return model.logits(x[:, -1]), cache

    @partial(jax.jit, donate_argnums=2)
    def decode(model: Decoder, ids: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        x, cache = model.hidden(Tokens(ids), cache)
        return model.logits(x[:, -1]), cache

    @jax.jit
    def rerun(model: Decoder, ids: jax.Array) -> jax.Array:
        # What generation without a cache would do for each token.
        x, _ = model.hidden(Tokens(ids), model.init_cache(B, 0))
        return model.logits(x[:, -1])

    measure = partial(_measure, dtype=dtype, repeats=repeats)
    yield measure(
        "transformer/attention/prefill",
        prefill,
        model,
        ids,
        shape=shape | {"T": _PREFIX},
        tokens=B * _PREFIX,
    )
    held = [prefill(model, ids)[1]]

    def advance() -> jax.Array:
        logits, held[0] = decode(model, ids[:, :1], held[0])
        return logits

    times = repeat(advance, repeats=repeats)
    yield row("transformer/attention/decode", sizes, dtype, times, tokens=B)
    yield measure(
        "transformer/rerun_prefix/decode", rerun, model, ids, shape=sizes, tokens=B
    )


def _measure(name, call, *arguments, shape, dtype, repeats, tokens) -> BenchRow:
    times = repeat(lambda: call(*arguments), repeats=repeats)
    return row(name, shape, dtype, times, tokens=tokens)


def _model(shape: dict[str, int], dtype: Dtype) -> ModelConfig:
    width = shape["D"]
    heads = width // 128
    return ModelConfig(
        vocabulary=shape["V"],
        dtype=dtype,
        stack=TransformerConfig(
            layers=shape["L"],
            width=width,
            attention=AttentionConfig(heads=heads, key_heads=heads, head_width=128),
            mlp=MlpConfig(kind="relu_squared", width=4 * width),
            # All layers in one turn of the scan: at this depth the loop itself would be
            # seen.
            unroll=shape["L"],
        ),
    )
