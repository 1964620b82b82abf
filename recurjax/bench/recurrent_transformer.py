"""One Recurrent Transformer layer by schedule and block, beside a Transformer layer."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from recurjax.bench.timing import Row, repeat, row
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Alibi
from recurjax.layers.self_attention import AttentionConfig
from recurjax.types import Tokens
from recurjax.variants.recurrent_transformer import (
    RecurrentTransformerConfig,
    RecurrentTransformerStack,
)
from recurjax.variants.transformer import TransformerConfig, TransformerStack

Dtype = Literal["float32", "bfloat16"]

SMALL = ({"B": 8, "T": 256, "D": 128, "H": 4}, {"B": 8, "T": 1024, "D": 256, "H": 4})
"""The shapes of the authors' figures on two CPU cores."""

LARGE = tuple({"B": 32 << i, "T": 512, "D": 1024, "H": 16} for i in range(7))
"""The paper's table: one layer on one accelerator, batch 32 to 2048."""

BLOCKS = (4, 16, 64)

_NAIVE, _TILED = "recurrent_transformer/naive", "recurrent_transformer/tiled"


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[Row]:
    """Measures every row; passes that compile a naive loop are the slow ones."""
    for shape in LARGE if large else SMALL:
        for name, config in _configs(shape).items():
            yield from _layer(name, config, shape, dtype, repeats)


def summary(rows: list[Row]) -> str:
    """Says what the tiles save, at the longest shape."""
    longest = max(row.shape["T"] for row in rows)
    times = {row.name: row.min_ms for row in rows if row.shape["T"] == longest}
    both = "forward_backward"
    ratio = times[f"{_NAIVE}/{both}"] / times[f"{_TILED}/{both}"]
    return (
        f"tiled against naive, forward and backward, T {longest}: {ratio:.1f} times "
        "faster"
    )


def _configs(shape: dict[str, int]) -> dict[str, Any]:
    """Returns the layers to time, by row name."""
    D, H = shape["D"], shape["H"]
    recurrent = partial(
        RecurrentTransformerConfig,
        layers=1,
        width=D,
        heads=H,
        key_heads=H,
        head_width=D // H,
        mlp=MlpConfig(width=4 * D),
    )
    schedules = ("naive", "tiled", "prefix", "wavefront")
    configs: dict[str, Any] = {name: recurrent(schedule=name) for name in schedules}
    configs |= {f"block{c}": recurrent(block=c) for c in BLOCKS}
    configs["transformer"] = TransformerConfig(
        layers=1,
        width=D,
        attention=AttentionConfig(
            heads=H,
            key_heads=H,
            head_width=D // H,
            position=Alibi(),
            qk_norm=NormConfig(),
            qk_norm_over="full",
        ),
        mlp=MlpConfig(width=4 * D),
    )
    return {f"recurrent_transformer/{name}": made for name, made in configs.items()}


def _layer(
    name: str, config: Any, shape: dict[str, int], dtype: Dtype, repeats: int
) -> Iterator[Row]:
    """Measures a layer's forward, its gradient in x and weights, and one more token."""
    B, T, D = shape["B"], shape["T"], shape["D"]
    recurrent = isinstance(config, RecurrentTransformerConfig)
    kind = RecurrentTransformerStack if recurrent else TransformerStack
    stack = jax.jit(lambda: kind(config, rngs=nnx.Rngs(0)))()
    x = jax.random.normal(jax.random.key(1), (B, T, D), dtype)
    tokens = Tokens(jnp.zeros((B, T), jnp.int32))

    @jax.jit
    def forward(stack: Any, x: jax.Array) -> jax.Array:
        return stack(x, stack.init_cache(B, 0, x.dtype), tokens)[0]

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def gradient(stack: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(forward(stack, x).astype(jnp.float32) ** 2)

    @partial(jax.jit, donate_argnums=2)
    def step(stack: Any, x: jax.Array, cache: Any) -> Any:
        return stack(x, cache, Tokens(tokens.ids[:, :1]))

    for what, call in (("forward", forward), ("forward_backward", gradient)):
        times = repeat(partial(call, stack, x), repeats=repeats)
        yield row(f"{name}/{what}", shape, dtype, times, tokens=B * T)
    cache = stack.init_cache(B, T, x.dtype)
    cache = cache._replace(position=jnp.full(B, T // 2, jnp.int32))
    held = [cache]

    def advance() -> jax.Array:
        z, held[0] = step(stack, x[:, :1], held[0])
        return z

    times = repeat(advance, repeats=min(repeats, T // 2 - 2))
    sizes = {"B": B, "T": 1, "S": T, "D": D, "H": shape["H"]}
    yield row(f"{name}/decode", sizes, dtype, times, tokens=B)
