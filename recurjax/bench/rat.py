"""RAT's rows: one layer each of RNN, RAT(16), RAT(64), attention and sliding window."""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from recurjax.bench.timing import BenchRow, repeat, row
from recurjax.layers.initialization import InitConfig
from recurjax.layers.norm import Norm, NormConfig
from recurjax.types import Cache, Tokens
from recurjax.variants.rat import MixerConfig, presets
from recurjax.variants.rat.mixers import make_mixer

Dtype = Literal["float32", "bfloat16"]

SMALL = {"B": 1, "D": 256, "H": 4}
"""The shapes of the PyTorch figures below, for two CPU cores."""

LARGE = {"B": 1, "D": 2048, "H": 16}
"""The 1.3B model's layer, for one accelerator; B is what makes up 262,144 tokens."""

SMALL_LENGTHS = (1024, 4096, 16384)
LARGE_LENGTHS = (4096, 16384, 65536)
LARGE_TOKENS = 262_144

PYTORCH = {
    "attention": (85.1, 300.6, 0.42),
    "rat16": (37.9, 124.8, 0.42),
    "rnn": (17.6, 48.6, 0.16),
}
"""PyTorch on two idle cores at T 4096, B 1, D 256, H 4, float32, minimum in ms:
forward, forward and backward, decode at position 4095; attention is its flash kernel
(SDPA)."""

_WINDOW = 1024
_PASSES = ("forward", "forward_backward", "decode")


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Measures every layer at every length; decode is of the last position."""
    shape = LARGE if large else SMALL
    for length in LARGE_LENGTHS if large else SMALL_LENGTHS:
        # Fewer rows for longer ones, so that every length has the same number of tokens
        # and rates can be compared down a column.
        batch = max(1, LARGE_TOKENS // length) if large else shape["B"]
        sizes = shape | {"B": batch, "T": length}
        for name, mixer in mixers(sizes).items():
            yield from layer_rows(name, mixer, sizes, dtype, repeats)


def summary(rows: list[BenchRow]) -> str:
    """Compares RAT(16) with attention, and all with PyTorch where shapes agree."""
    times = {
        # A decode has T = 1; its rows differ in S, the tokens before.
        (row.name, row.shape["S" if "decode" in row.name else "T"]): row.min_ms
        for row in rows
    }
    lines = []
    for length in sorted({length for _, length in times}):
        ratios = [
            times[f"rat/attention/{what}", length] / times[f"rat/rat16/{what}", length]
            for what in _PASSES
        ]
        shares = ", ".join(
            f"{what} {ratio:.1f}" for what, ratio in zip(_PASSES, ratios, strict=True)
        )
        lines.append(f"attention's time over RAT(16)'s at T {length}: {shares}")
    compared = [
        (name, what, times.get((f"rat/{name}/{what}", 4096)), theirs)
        for name, figures in PYTORCH.items()
        for what, theirs in zip(_PASSES, figures, strict=True)
    ]
    # PyTorch's figures were taken at these shapes, in this dtype: elsewhere a ratio to
    # them would mean nothing.
    if rows[0].shape["D"] == SMALL["D"] and rows[0].dtype == "float32":
        shares = ", ".join(
            f"{name}/{what} {ours / theirs:.2f}"
            for name, what, ours, theirs in compared
            if ours is not None
        )
        lines.append(f"our time over PyTorch's on idle cores at T 4096: {shares}")
    lines.append(f"cache per token and layer: {_cache_bytes(rows[0])}")
    return "\n".join(lines)


def mixers(shape: dict[str, int]) -> dict[str, MixerConfig]:
    """Returns what is measured, for sizes named D, H and T."""
    size = {"width": shape["D"], "heads": shape["H"]}
    return {
        "rnn": presets.rnn(**size, length=shape["T"]),
        "rat16": presets.rat(**size, chunk=16),
        "rat64": presets.rat(**size, chunk=64),
        "attention": presets.attention(**size),
        "swa": presets.attention(**size, window=_WINDOW),
    }


def layer_rows(
    name: str, mixer: MixerConfig, shape: dict[str, int], dtype: Dtype, repeats: int
) -> Iterator[BenchRow]:
    """Times x + mixer(norm(x)): training's two passes, and one token after T - 1."""
    B, T, D = (shape[letter] for letter in "BTD")
    layer = jax.jit(partial(MixerLayer, mixer, D))(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (B, T, D), dtype)
    ids = jnp.zeros((B, T), jnp.int32)

    @jax.jit
    def forward(layer, x):
        # A cache of length 0 is what training uses: nothing is kept.
        empty = layer.mixer.init_cache(1, B, 0, dtype)
        return layer(x, empty, Tokens(ids))[0]

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def gradient(layer, x):
        # Summed in float32: a bfloat16 sum over B T D entries would lose most of them.
        # Every entry of the output then has the gradient 1.
        return jnp.sum(forward(layer, x).astype(jnp.float32))

    @partial(jax.jit, donate_argnums=2)
    def step(layer, x, cache):
        return layer(x, cache, Tokens(ids[:, :1]))

    measure = partial(row, dtype=dtype)
    for what, program in (("forward", forward), ("forward_backward", gradient)):
        times = repeat(partial(program, layer, x), repeats=repeats)
        yield measure(f"rat/{name}/{what}", shape, times=times, tokens=B * T)
    cache = layer.mixer.init_cache(1, B, T, dtype)
    # The cache claims T - 1 earlier tokens. Its entries may hold anything, because the
    # time does not depend on their values.
    held = [cache._replace(position=jnp.full(B, T - 1, jnp.int32))]
    token = x[:, :1]

    def advance() -> jax.Array:
        # The position stays: every call is the same step.
        y, held[0] = step(layer, token, held[0])
        return y

    # A decode takes microseconds to milliseconds: more repeats, or noise decides.
    times = repeat(advance, repeats=max(repeats, 20), warmup=5)
    yield measure(f"rat/{name}/decode", shape | {"T": 1, "S": T}, times=times, tokens=B)


class MixerLayer(nnx.Module):
    """x + mixer(norm(x)): what every row times."""

    def __init__(self, mixer: MixerConfig, width: int, key: jax.Array):
        init, rngs = InitConfig(output="same"), nnx.Rngs(key)
        self.norm = Norm(NormConfig(), width)
        self.mixer = make_mixer(mixer, width, init, layer=0, layers=1, rngs=rngs)

    def __call__(self, x: jax.Array, cache: Cache, tokens: Tokens):
        y, cache = self.mixer(self.norm(x), cache, tokens)
        return x + y, cache


def _cache_bytes(row: BenchRow) -> str:
    """Returns how many bytes of cache each layer's token costs, states aside."""
    shape = {letter: row.shape[letter] for letter in "BDH"} | {"T": row.shape["T"]}
    # Long enough that a layer's fixed state, such as a recurrent state or a window, is
    # negligible compared with its bytes per token.
    length, sizes = 65536, []
    for name, mixer in mixers(shape).items():
        # Shapes suffice to count bytes; nothing of 65,536 tokens is allocated.
        layer = jax.eval_shape(
            partial(MixerLayer, mixer, shape["D"]), jax.random.key(0)
        )
        cache = jax.eval_shape(
            lambda layer=layer: layer.mixer.init_cache(1, 1, length, row.dtype)
        )
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        sizes.append(f"{name} {total / length:.1f} B")
    return ", ".join(sizes) + f" (at {length} tokens)"
