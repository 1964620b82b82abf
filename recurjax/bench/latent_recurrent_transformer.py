"""Times training steps by number of subsets, decoding, and prefill."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from recurjax.bench.timing import BenchRow, repeat, row
from recurjax.bench.training_step import (
    BenchedRun,
    one_device_step,
    random_batch,
    step_row,
)
from recurjax.model import Decoder, ModelConfig
from recurjax.training.objective import Interleaved, NextToken
from recurjax.training.optimizers import MuonAdamW
from recurjax.types import Batch, Tokens
from recurjax.variants.latent_recurrent_transformer.presets import (
    FINAL_NORM,
    layerwise,
    nanochat,
    shared,
)

Dtype = Literal["float32", "bfloat16"]
Trained = NextToken | Interleaved

SMALL = {"B": 8, "T": 256, "D": 256, "L": 4, "V": 4096}
"""The depth-4, width-256 model of nanochat's speed test, for two CPU cores."""

LARGE = {"B": 16, "T": 2048, "D": 768, "L": 12, "V": 32768}
"""A 12-layer model of width 768, for one accelerator."""

SUBSETS = (1, 2, 4)
SWEEPS = 4
_NAME = "latent_recurrent_transformer"


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Measures every row; nothing is rematerialised."""
    shape = LARGE if large else SMALL

    def measure(
        kind: str, objective: Trained, *, suffix: str = ""
    ) -> Iterator[BenchRow]:
        config = model_of(kind, shape, dtype)
        return training_rows(
            f"{kind}{suffix}", config, objective, shape=shape, repeats=repeats
        )

    # Every ratio of the summary is over this row: the same layers without a memory.
    yield from measure("base", NextToken())
    # Interleaved training makes one pass a subset after the first, so its time should
    # grow in proportion to S; the rows show how far it does.
    for subsets in SUBSETS:
        objective = Interleaved(subsets=subsets)
        yield from measure("shared", objective, suffix=f"_s{subsets}")
    yield from measure("layerwise", Interleaved(subsets=2), suffix="_s2")
    for kind in ("base", "shared", "layerwise"):
        yield from _inference(kind, shape, dtype, repeats)


def summary(rows: list[BenchRow]) -> str:
    """Returns what the memory costs, in training and in decoding."""
    # The minimum of the repeats, here and in every summary: a busy machine only ever
    # adds time, so the least disturbed call is the one to compare.
    times = {row.name.removeprefix(f"{_NAME}/"): row.min_ms for row in rows}

    def over_the_baseline(what: str) -> str:
        base = times[f"base/{what}"]
        ratios = [
            f"S = {s}: {times[f'shared_s{s}/{what}'] / base:.2f}" for s in SUBSETS
        ]
        return ", ".join(ratios)

    tokens = [
        f"{kind}: {times[f'{kind}/decode'] / times['base/decode']:.2f}"
        for kind in ("shared", "layerwise")
    ]
    exact = times["shared/prefill"] / times[f"shared_sweeps{SWEEPS}/prefill"]
    return (
        f"forward and backward over the baseline's, "
        f"{over_the_baseline('forward_backward')}; a training step with its optimizer, "
        f"{over_the_baseline('train_step')}; a decoded token over the baseline's, "
        f"{', '.join(tokens)}; an exact prefill takes {exact:.1f} times as long as "
        f"{SWEEPS} sweeps"
    )


def training_rows(
    name: str,
    config: ModelConfig,
    objective: Trained,
    *,
    shape: dict[str, int],
    repeats: int,
) -> Iterator[BenchRow]:
    """Forward and backward of all passes, and a complete step with MuonAdamW."""
    dtype, name = config.dtype, f"{_NAME}/{name}"
    B, T = shape["B"], shape["T"]
    run = BenchedRun(
        model=config,
        optimizer=MuonAdamW(),
        objective=objective,
        batch=B,
        length=T,
    )
    # Build the step as `recurjax train` does, so that the bench times the same program.
    step = one_device_step(run)
    state, rows = step.initialise(jax.random.key(0)), random_batch(run)

    # The gradient alone shows what the passes cost: MuonAdamW's products with the
    # weights do not grow with S and would hide it in a small model.
    @jax.jit
    @jax.grad
    def gradient(model: Decoder, rows: Batch) -> jax.Array:
        return objective(model, rows)[0]

    times = repeat(lambda: gradient(state.model, rows), repeats=repeats)
    yield row(f"{name}/forward_backward", shape, dtype, times, tokens=B * T)
    yield step_row(
        f"{name}/train_step",
        step,
        state,
        rows,
        shape=shape,
        dtype=dtype,
        repeats=repeats,
    )


def _inference(
    kind: str, shape: dict[str, int], dtype: Dtype, repeats: int
) -> Iterator[BenchRow]:
    """Prefill of T tokens, exact and swept, and one more token after them."""
    config = model_of(kind, shape, dtype)
    B, T = shape["B"], shape["T"]
    # Made under jit: without it every initialiser would be compiled by itself.
    model = jax.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))()
    ids = jnp.ones((B, T), jnp.int32)

    @jax.jit
    def prefill(model: Decoder, ids: jax.Array) -> Any:
        # T + 64 entries: room for the decoded tokens that are timed after the prompt.
        x, cache = model.hidden(Tokens(ids), model.init_cache(B, T + 64))
        # Only the last position's logits, as in generation: the head over all T
        # positions would outweigh the stack in a small model.
        return model.logits(x[:, -1]), cache

    @jax.jit
    def sweep(model: Decoder, ids: jax.Array) -> Any:
        cache = model.init_cache(B, T + 64)
        x, cache, aux = model.prefill(Tokens(ids), cache, by=f"sweeps:{SWEEPS}")
        return model.logits(x[:, -1]), cache, aux

    # The cache is donated and written in place; a copy of it at every token would be
    # what the row measures.
    @partial(jax.jit, donate_argnums=2)
    def decode(model: Decoder, ids: jax.Array, cache: Any) -> Any:
        x, cache = model.hidden(Tokens(ids), cache)
        return model.logits(x[:, -1]), cache

    measure = partial(repeat, repeats=repeats)
    times = measure(lambda: prefill(model, ids))
    yield row(f"{_NAME}/{kind}/prefill", shape, dtype, times, tokens=B * T)
    # Sweeps need the shared memory; they are what the exact prefill is compared with.
    if kind == "shared":
        times = measure(lambda: sweep(model, ids))
        name = f"{_NAME}/{kind}_sweeps{SWEEPS}/prefill"
        yield row(name, shape, dtype, times, tokens=B * T)
    # A donated cache is gone after the call, so the newest one is held here for the
    # next.
    held = [prefill(model, ids)[1]]

    def advance() -> jax.Array:
        logits, held[0] = decode(model, ids[:, :1], held[0])
        return logits

    # T is what one call reads, S the earlier tokens in the cache.
    sizes = shape | {"T": 1, "S": T}
    times = measure(advance)
    yield row(f"{_NAME}/{kind}/decode", sizes, dtype, times, tokens=B)


def model_of(kind: str, shape: dict[str, int], dtype: Dtype) -> ModelConfig:
    """Returns a model of these sizes: "base", "shared" or "layerwise"."""
    layers, width = shape["L"], shape["D"]
    memory = {"base": None, "shared": shared(layers), "layerwise": layerwise(layers)}
    return ModelConfig(
        vocabulary=shape["V"],
        dtype=dtype,
        final_norm=FINAL_NORM,
        logit_soft_cap=15.0,
        stack=nanochat(
            layers,
            width=width,
            head_width=min(128, width),
            vocabulary=shape["V"],
            length=shape["T"],
            value_gate_channels=min(32, width),
            memory=memory[kind],
        ),
    )
