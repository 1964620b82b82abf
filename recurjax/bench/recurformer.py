"""RecurFormer's rows: the selective scan by every backend, the mixer, and layers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.dispatch import Implementation
from pallas_kernels.selective_scan import api, selective_scan
from pallas_kernels.selective_scan.reference import selective_scan_reference
from recurjax.bench.timing import BenchRow, repeat, row
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mamba import Mamba
from recurjax.layers.mlp import MlpConfig
from recurjax.types import Tokens
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.recurformer.block import RecurFormerBlock
from recurjax.variants.recurformer.config import cache_bytes
from recurjax.variants.recurformer.stack import layer_cache
from recurjax.variants.transformer import TransformerConfig

Dtype = Literal["float32", "bfloat16"]

SMALL = {"B": 1, "I": 512, "N": 16}
"""The shapes of a small mixer, for two CPU cores."""

LARGE = {"B": 8, "I": 2048, "N": 16}
"""Those of a large one, for one accelerator."""

SMALL_LENGTHS = (512, 2048, 16384)
LARGE_LENGTHS = (4096, 65536)
REFERENCE_UP_TO = 2048
"""The reference's gradient keeps every state: 32 kB a position at the small shapes."""
SMALL_LAYER = {"B": 1, "D": 256, "H": 8}
LARGE_LAYER = {"B": 8, "D": 2048, "H": 16}
"""One layer's attention: its mixer at beta 1 has the scan's channels above."""

SMALL_LAYER_LENGTHS = (1024, 4096, 16384)
LARGE_LAYER_LENGTHS = (4096, 16384)
BETAS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
MIXER_LENGTHS = (2048,)
DT_RANK = 16
"""Of Mamba; the paper's 256 is for layers of width 4,096."""

_NAME = "selective_scan"


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Measures the scan, then the mixer, then a layer at every beta and length.

    The decode of a scan is one position; that of a layer the last of S, and its shape
    also says what the layer keeps of S tokens (bytes), its parameters, and its training
    FLOPs per token.
    """
    yield from _scan_rows(large, dtype, repeats)
    layer = LARGE_LAYER if large else SMALL_LAYER
    for length in MIXER_LENGTHS:
        yield from mixer_rows(layer | {"T": length}, dtype, repeats)
    for length in LARGE_LAYER_LENGTHS if large else SMALL_LAYER_LENGTHS:
        for beta in BETAS:
            yield from layer_rows(beta, layer | {"T": length}, dtype, repeats)


def mixer_rows(sizes: dict[str, int], dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Times a Mamba mixer of width D alone."""
    mamba = Mamba(MambaConfig(dt_rank=DT_RANK), sizes["D"], rngs=nnx.Rngs(0))

    def run(mamba: Mamba, x: jax.Array) -> jax.Array:
        return mamba(x, mamba.init_cache(len(x)))[0]

    shape = {letter: sizes[letter] for letter in "BTD"}
    yield from _module_rows("mamba", run, mamba, shape, dtype, repeats)


def layer_rows(
    beta: float, sizes: dict[str, int], dtype: Dtype, repeats: int
) -> Iterator[BenchRow]:
    """Measures one layer's attention with round(beta H) heads replaced."""
    config = _layer_config(beta, sizes)
    block = RecurFormerBlock(config, layer=0, rngs=nnx.Rngs(0))
    layer, B, T = block.attention, sizes["B"], sizes["T"]
    name = f"layer/beta_{round(100 * beta)}" if beta else "layer/attention"

    def run(layer: Any, x: jax.Array) -> jax.Array:
        tokens = Tokens(jnp.zeros(x.shape[:2], jnp.int32))
        return layer(x, layer_cache(config, 0, len(x), 0, x.dtype), tokens)[0]

    yield from _module_rows(name, run, layer, sizes, dtype, repeats)
    cache = layer_cache(config, 0, B, T, jnp.dtype(dtype))
    keys_values = cache.keys_values._replace(position=jnp.full(B, T - 1, jnp.int32))
    # T - 1 tokens precede the decoded one, which is the last of S.
    cache = cache._replace(keys_values=keys_values)
    x = _drawn((B, 1, sizes["D"]), dtype)

    # Without donation, unlike the other benches: the cache of one layer is small, and
    # the same one can be used for every call.
    @jax.jit
    def step(layer: Any, x: jax.Array, cache: Any) -> Any:
        return layer(x, cache, Tokens(jnp.zeros((B, 1), jnp.int32)))

    times = repeat(partial(step, layer, x, cache), repeats=repeats)
    held = cache_bytes(config, T, value_bytes=jnp.dtype(dtype).itemsize)
    shape = {letter: sizes[letter] for letter in "BDH"} | {"S": T}
    # Put the bytes of all rows, the training FLOPs per token and the parameters into
    # the shape, so that the table shows them next to the time.
    flops = round(config.mixing_flops(0, T))
    shape |= {"bytes": B * (held.keys_values + held.states), "flops": flops}
    shape |= {"parameters": sum(leaf.size for leaf in jax.tree.leaves(layer))}
    yield row(f"{name}/decode", shape, dtype, times, tokens=B)


def _layer_config(beta: float, sizes: dict[str, int]) -> RecurFormerConfig:
    D, H = sizes["D"], sizes["H"]
    base = TransformerConfig(
        layers=1,
        width=D,
        attention=AttentionConfig(heads=H, key_heads=H, head_width=D // H),
        mlp=MlpConfig(width=1),
    )
    return RecurFormerConfig(
        # The first heads are replaced: which ones makes no difference to the time.
        transformer=base,
        replaced=(tuple(range(round(beta * H))),),
        mamba=MambaConfig(dt_rank=DT_RANK),
    )


def _module_rows(
    name: str,
    run: Callable[..., jax.Array],
    module: Any,
    sizes: dict[str, int],
    dtype: Dtype,
    repeats: int,
) -> Iterator[BenchRow]:
    x = _drawn((sizes["B"], sizes["T"], sizes["D"]), dtype)
    forward = jax.jit(run)
    # Gradients in the weights and in x: a layer inside a stack needs both.
    both = jax.jit(jax.grad(lambda module, x: jnp.sum(run(module, x)), argnums=(0, 1)))
    for what, program in (("forward", forward), ("forward_backward", both)):
        times = repeat(partial(program, module, x), repeats=repeats)
        tokens = sizes["B"] * sizes["T"]
        yield row(f"{name}/{what}", sizes, dtype, times, tokens=tokens)


def _drawn(shape: tuple[int, ...], dtype: str) -> jax.Array:
    # Drawn by numpy: the same numbers on every device and version of jax.
    draw = np.random.default_rng(0).normal(size=shape)
    return jnp.asarray(draw.astype(np.float32), dtype)


def _scan_rows(large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Measures every backend at every length."""
    shape = LARGE if large else SMALL
    for length in LARGE_LENGTHS if large else SMALL_LENGTHS:
        for name, scan in _scans(length).items():
            yield from _passes(name, scan, shape | {"T": length}, dtype, repeats)
    for name, scan in _scans(1).items():
        yield _decode(name, scan, shape | {"T": 1}, dtype, repeats)


def summary(rows: list[BenchRow]) -> str:
    """Compares scans with the reference, and layers with attention."""
    times = {
        (row.name, row.shape.get("T", row.shape.get("S", 0))): row.min_ms
        for row in rows
    }
    lines, layers = [], []
    for (name, length), time in times.items():
        # Layers are compared with attention's row of the same pass and length, scans
        # with the reference's.
        if name.startswith("layer/") and "/attention/" not in name:
            attention = times[f"layer/attention/{name.split('/')[-1]}", length]
            layers.append(f"{name} at {length} {attention / time:.2f}")
        what = name.split("/")[-1]
        theirs = times.get((f"{_NAME}/reference/{what}", length))
        if theirs is not None and "/reference/" not in name:
            lines.append(f"{name} at T {length} {theirs / time:.1f}")
    return (
        f"the reference's time over {', '.join(lines)}\n"
        f"attention's time over {', '.join(layers)}"
    )


def _scans(length: int) -> dict[str, Callable[..., Any]]:
    """Returns the backends that can run here, by name, and the reference."""
    scans: dict[str, Callable[..., Any]] = {}
    # A step of the reference keeps B I N floats; above this length a gradient of it
    # takes more memory than what is compared with it.
    if length <= REFERENCE_UP_TO:
        scans["reference"] = selective_scan_reference
    # Asking costs nothing: shapes are traced and no backend is compiled.
    shapes = jax.eval_shape(partial(_arrays, SMALL | {"T": 2}, "float32"))
    for name in api.OP.backends:
        scan = partial(selective_scan, implementation=cast(Implementation, name))
        try:
            jax.eval_shape(lambda arrays, scan=scan: scan(**arrays), shapes)
        except NotImplementedError:  # a kernel for an absent device
            continue
        scans[name] = scan
    return scans


def _passes(
    name: str,
    scan: Callable[..., Any],
    sizes: dict[str, int],
    dtype: Dtype,
    repeats: int,
) -> Iterator[BenchRow]:
    arrays = jax.tree.map(jnp.asarray, _arrays(sizes, dtype))

    # The states after the output are not used: [0] leaves the last one out.
    @jax.jit
    def forward(arrays: dict[str, jax.Array]) -> Any:
        return scan(**arrays)[0]

    @jax.jit
    def both(arrays: dict[str, jax.Array]) -> Any:
        return jax.grad(lambda arrays: jnp.sum(scan(**arrays)[0]))(arrays)

    tokens = sizes["B"] * sizes["T"]
    for what, program in (("forward", forward), ("forward_backward", both)):
        call = partial(program, arrays)
        times = repeat(call, repeats=repeats)
        yield row(f"{_NAME}/{name}/{what}", sizes, dtype, times, tokens=tokens)


def _decode(
    name: str,
    scan: Callable[..., Any],
    sizes: dict[str, int],
    dtype: Dtype,
    repeats: int,
) -> BenchRow:
    arrays = jax.tree.map(jnp.asarray, _arrays(sizes, dtype))
    step = jax.jit(lambda arrays: tuple(scan(**arrays)))
    times = repeat(lambda: step(arrays), repeats=repeats)
    return row(f"{_NAME}/{name}/decode", sizes, dtype, times, tokens=sizes["B"])


def _arrays(sizes: dict[str, int], dtype: str) -> dict[str, np.ndarray]:
    """Returns the inputs of a call as a mixer gives them."""
    draw = np.random.default_rng(0)
    B, T, I, N = (sizes[letter] for letter in "BTIN")

    def normal(*shape: int, dtype: str = dtype) -> np.ndarray:
        return draw.normal(size=shape).astype(jnp.dtype(dtype))

    return {
        "u": normal(B, T, I),
        "dt": normal(B, T, I),
        # Mamba's start, A = -1 ... -N in each channel: decays that stay inside (0, 1],
        # so that long sequences neither vanish nor overflow and time is that of a real
        # mixer.
        "a": -np.tile(np.arange(1, N + 1, dtype="float32"), (I, 1)),
        "b": normal(B, T, N),
        "c": normal(B, T, N),
        "skip": np.ones(I, "float32"),
        "z": normal(B, T, I),
        "dt_bias": normal(I, dtype="float32"),
        "initial": np.zeros((B, I, N), "float32"),
    }
