"""How the TPU kernels are launched: block sizes, VMEM, and arithmetic they share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec, LayerWeights
from pallas_kernels.recurrent_prefill.tiles.layout import Tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Sizes of one layer's call: widths in elements, `bytes` of a weight."""

    batch: int
    positions: int
    width: int
    heads_width: int
    inner_width: int
    gated: bool
    bytes: int

    @classmethod
    def of(cls, x: Array, weights: LayerWeights, spec: LayerSpec) -> "LayerSizes":
        """Reads the sizes off a call."""
        B, T, D = x.shape
        return cls(
            batch=B,
            positions=T,
            width=D,
            heads_width=spec.heads * spec.head_width,
            inner_width=weights.w_up.shape[2],
            gated=weights.w_gate is not None,
            bytes=jnp.dtype(spec.dtype).itemsize,
        )

    @property
    def pre_width(self) -> int:
        """Width of the MLP's first product."""
        return self.inner_width * (2 if self.gated else 1)


def choose_tiles(sizes: LayerSizes, tile: int | None, vmem: int) -> Tiles:
    """Returns the most rows that fit `vmem` bytes; `tile` overrides its positions."""
    tile = 16 if tile is None else tile
    keys = min(128, -(-sizes.positions // tile) * tile)
    most = -(-sizes.batch // 8) * 8
    for rows in (32, 16, 8):
        tiles = Tiles(tile=tile, rows=rows, keys=keys)
        if rows <= max(most, 8) and vmem_bytes(sizes, tiles) <= vmem:
            return tiles
    return Tiles(tile=tile, rows=8, keys=keys)


def vmem_bytes(sizes: LayerSizes, tiles: Tiles) -> int:
    """Estimates what the larger of the two kernels holds in VMEM."""
    D, HE, F, pre_width = (
        sizes.width,
        sizes.heads_width,
        sizes.inner_width,
        sizes.pre_width,
    )
    weights = sizes.bytes * (3 * HE * D + D * pre_width + F * D)
    tile_rows = tiles.tile * tiles.rows
    prefix = 2 * tiles.rows * -(-sizes.positions // tiles.keys) * tiles.keys
    # Blocks come twice, for the one computed on and the one on its way; a float32 row
    # of the products by head is in flight besides.
    forward = (
        sizes.bytes * prefix * HE
        + tile_rows * 2 * (4 * 2 * D + sizes.bytes * 7 * HE)
        + tile_rows * 4 * 7 * HE
    )
    backward = (
        tile_rows * 2 * (4 * (7 * D + 5 * HE) + sizes.bytes * (5 * HE + 2 * pre_width))
        + tile_rows * 4 * 6 * HE
    )
    return weights + max(forward, backward)


def refusal_of_sizes(sizes: LayerSizes, tile: int | None, vmem: int) -> str | None:
    """Returns why a layer of these sizes cannot run in `vmem` bytes, None if it can."""
    widths = {
        "D": sizes.width,
        "heads * head_width": sizes.heads_width,
        "F": sizes.inner_width,
    }
    for name, width in widths.items():
        if width % 128:
            return f"{name} must be a multiple of 128, got {width}"
    if tile not in (None, 16, 32):
        return f"runs tiles of 16 or 32 positions, got tile={tile}"
    needed = vmem_bytes(sizes, choose_tiles(sizes, tile, vmem))
    if needed > vmem:
        return (
            f"weights and prefix must fit {vmem >> 20} MiB of VMEM, got "
            f"{needed >> 20} MiB"
        )
    return None


LANES = 128
"""Width of a vector register."""
NEAR = 4
"""Positions of the own tile that a step reads at once; divides every tile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What every kernel of a call has in common.

    Attributes:
      vmem: bytes of VMEM that a kernel may use.
      interpret: False, True, or pltpu.InterpretParams for the TPU's own semantics.
    """

    spec: LayerSpec
    tiles: Tiles
    vmem: int
    interpret: bool | pltpu.InterpretParams = False


class HeadGroup(NamedTuple):
    """Heads whose lanes are read together, from head `first` on."""

    first: int
    heads: int
    width: int


def launch_kernel(
    launch: Launch,
    kernel: Callable,
    arguments: Any,
    *,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Any,
    scratch_shapes: Any,
    **static,
) -> Any:
    """Runs a kernel body over row tiles and, in order, the tiles of the sequence.

    Args:
      kernel: gets `static`, and three NamedTuples of refs of these arguments' types:
      arguments, out_shape, scratch_shapes: NamedTuples of arrays, shapes, scratch.

    Returns:
      The outputs, in the type of `out_shape`.
    """
    groups = (arguments, out_shape, scratch_shapes)

    def body(*refs):
        rest = list(refs)
        named = [type(group)(*(rest.pop(0) for _ in group)) for group in groups]
        kernel(*named, **static)

    out = pl.pallas_call(
        body,
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        scratch_shapes=list(scratch_shapes),
        interpret=launch.interpret,
        compiler_params=pltpu.CompilerParams(
            # Row tiles share nothing: the two cores of a v5p take turns. A row tile's
            # sequence lies in one core's scratch.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=launch.vmem,
        ),
        name=kernel.__name__.strip("_"),
    )(*arguments)
    return type(out_shape)(*out)


def resident(array: jax.Array) -> pl.BlockSpec:
    """Returns the whole array, read once and kept in one buffer."""
    return pl.BlockSpec(
        array.shape,
        lambda i, j: (0,) * array.ndim,
        pipeline_mode=pl.Buffered(buffer_count=1),
    )


def head_groups(spec: LayerSpec) -> list[HeadGroup]:
    """Returns the heads in groups that fill the lanes of a register.

    The last group has the heads that are left: 16 heads of 40 are five threes and a
    head alone.
    """
    H, E = spec.heads, spec.head_width
    most = max(1, LANES // E)
    sizes = {first: min(most, H - first) for first in range(0, H, most)}
    return [HeadGroup(first, heads, heads * E) for first, heads in sizes.items()]


def head_indicator(spec: LayerSpec) -> Float[Array, "HE H"]:
    """Returns [H E, H] with 1 where a column of all heads belongs to a head."""
    shape = (spec.heads * spec.head_width, spec.heads)
    of_column = jax.lax.broadcasted_iota(jnp.int32, shape, 0) // spec.head_width
    head = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (of_column == head).astype(jnp.float32)


def slopes_row(spec: LayerSpec) -> Float[Array, "1 H"]:
    """Returns ALiBi's slopes [1, H], zeros without ALiBi."""
    head = jax.lax.broadcasted_iota(jnp.int32, (1, spec.heads), 1)
    if spec.alibi_max_bias is None:
        return jnp.zeros((1, spec.heads), jnp.float32)
    rate = -spec.alibi_max_bias / spec.heads
    return jnp.exp2(rate * (head + 1).astype(jnp.float32))


def norm_rows(
    x: Float[Array, "rows N"], scale_ref, shift_ref, kind: str, eps: float
) -> Float[Array, "rows N"]:
    """Normalises float32 rows [block_b, N]; scale and shift are [1, N]."""
    if kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    if kind != "none":
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale_ref[...] + shift_ref[...]


def dot(
    a: Float[Array, "N M"], b: Float[Array, "_ _"], *, transposed: bool = False
) -> Float[Array, "N _"]:
    """Multiplies a b, or a b^T; float32 operands exactly, accumulating in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
