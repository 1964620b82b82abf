"""Times one Recurrent Transformer layer by schedule and block, and a Transformer's."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from recurjax.bench.timing import BenchRow, repeat, row
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Alibi
from recurjax.model import Stack, make_stack
from recurjax.types import Tokens
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.transformer import TransformerConfig

Dtype = Literal["float32", "bfloat16"]
Layer = RecurrentTransformerConfig | TransformerConfig

SMALL = ({"B": 8, "T": 256, "D": 128, "H": 4}, {"B": 8, "T": 1024, "D": 256, "H": 4})
"""Two shapes for two CPU cores."""

LARGE = tuple({"B": 32 << i, "T": 512, "D": 1024, "H": 16} for i in range(7))
"""The paper's table: one layer on one accelerator, batch 32 to 2048."""

SCHEDULES = ("naive", "prefix", "wavefront")
BLOCKS = (4, 16, 64)

_PREFIX = "recurrent_transformer"
_PASSES = ("forward", "forward_backward")


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Measures every row; passes that compile a naive loop are the slow ones."""
    for shape in LARGE if large else SMALL:
        for name, config in layers(shape).items():
            yield from _layer(f"{_PREFIX}/{name}", config, shape, dtype, repeats)


def summary(rows: list[BenchRow]) -> str:
    """Compares the schedules with naive, and a decoded token with the Transformer's."""
    lines = []
    lengths = sorted({r.shape["T"] for r in rows} - {1})
    for T in lengths:
        times = {r.name: r.min_ms for r in rows if r.shape["T"] == T}
        both = {s: times.get(f"{_PREFIX}/{s}/forward_backward") for s in SCHEDULES}
        naive = both.pop("naive")
        if naive is not None:
            ratios = [f"{s} {naive / t:.1f}" for s, t in both.items() if t is not None]
            lines.append(
                f"naive's time over that of other schedules, forward and backward, T "
                f"{T}: {', '.join(ratios)}"
            )
    decoded = {(r.shape["S"], r.name): r.min_ms for r in rows if "S" in r.shape}
    ratios = [
        f"{decoded[S, f'{_PREFIX}/prefix/decode'] / theirs:.2f} at {S}"
        for (S, name), theirs in decoded.items()
        if name == f"{_PREFIX}/transformer/decode"
    ]
    if ratios:
        lines.append(
            "a decoded token over the Transformer layer's: "
            f"{', '.join(ratios)} positions"
        )
    return "\n".join(lines)


def layers(shape: dict[str, int]) -> dict[str, Layer]:
    """Returns the layers to time, by the middle part of their rows' names."""
    D, H = shape["D"], shape["H"]
    recurrent = partial(
        RecurrentTransformerConfig,
        # One layer: its cost is what the paper's table has, and a stack's is L times
        # that.
        layers=1,
        width=D,
        heads=H,
        key_heads=H,
        head_width=D // H,
        mlp=MlpConfig(width=4 * D),
    )
    configs: dict[str, Layer] = {name: recurrent(schedule=name) for name in SCHEDULES}
    # How many positions the default schedule takes at a time: small blocks wait for
    # each other more often, large ones do more of their work inside the sequential
    # part.
    configs |= {f"block{c}": recurrent(block=c) for c in BLOCKS}
    # The baseline has the same products: as many heads, the same feed-forward layer,
    # ALiBi and the norm of q and k over all heads, as the recurrent layer has by the
    # paper.
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
    return configs


class LayerPasses(NamedTuple):
    """A layer's compiled passes, as functions of (stack, x), and their arguments."""

    forward: Any
    forward_backward: Any
    stack: Stack
    x: jax.Array


def programs(config: Layer, shape: dict[str, int], dtype: Dtype) -> LayerPasses:
    """Makes the forward pass, and its gradient in weights and x."""
    B, T, D = shape["B"], shape["T"], shape["D"]
    stack: Stack = jax.jit(lambda: make_stack(config, rngs=nnx.Rngs(0)))()
    x = jax.random.normal(jax.random.key(1), (B, T, D), dtype)
    tokens = Tokens(jnp.zeros((B, T), jnp.int32))

    @jax.jit
    def forward(stack: Stack, x: jax.Array) -> jax.Array:
        return stack(x, stack.init_cache(B, 0, x.dtype), tokens)[0]

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def gradient(stack: Stack, x: jax.Array) -> jax.Array:
        # Squares, as the gradient of a plain sum is the same at every position and a
        # compiler may make use of that.
        return jnp.sum(forward(stack, x).astype(jnp.float32) ** 2)

    return LayerPasses(forward, gradient, stack, x)


def _layer(
    name: str, config: Layer, shape: dict[str, int], dtype: Dtype, repeats: int
) -> Iterator[BenchRow]:
    """Measures a layer's forward, its gradient in x and weights, and one more token."""
    B, T = shape["B"], shape["T"]
    passes = programs(config, shape, dtype)
    stack, x = passes.stack, passes.x
    for what in _PASSES:
        call = partial(getattr(passes, what), stack, x)
        times = repeat(call, repeats=repeats)
        yield row(f"{name}/{what}", shape, dtype, times, tokens=B * T)

    @partial(jax.jit, donate_argnums=2)
    def step(stack: Stack, x: jax.Array, cache: Any) -> Any:
        return stack(x, cache, Tokens(jnp.zeros((B, 1), jnp.int32)))

    cache = stack.init_cache(B, T, x.dtype)
    # Half of the cache is filled: the mean of what a generated token finds.
    cache = cache._replace(position=jnp.full(B, T // 2, jnp.int32))
    held = [cache]

    def advance() -> jax.Array:
        z, held[0] = step(stack, x[:, :1], held[0])
        return z

    # A decoded token moves the position on: at most as many as the cache has room for,
    # less the two of the warm-up.
    times = repeat(advance, repeats=min(repeats, T // 2 - 2))
    sizes = {"B": B, "T": 1, "S": T, "D": shape["D"], "H": shape["H"]}
    yield row(f"{name}/decode", sizes, dtype, times, tokens=B)
