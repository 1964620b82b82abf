"""How the TPU kernels are launched: block sizes, VMEM, and arithmetic they share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.recurrent_prefill.mosaic_tpu.tiles import Tiles
from pallas_kernels.recurrent_prefill.spec import LayerSpec

HIDDEN = -1e30
"""The logit of a pair that is not seen; a query's own pair is always seen."""
LANES = 128
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
    *arguments: jax.Array,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    scratch_shapes: Sequence,
    **static,
) -> Sequence[jax.Array]:
    """Runs a kernel body over row tiles and, in order, the tiles of the sequence."""
    return pl.pallas_call(
        partial(kernel, **static),
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        scratch_shapes=list(scratch_shapes),
        interpret=launch.interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=launch.vmem,
        ),
        name=kernel.__name__.strip("_"),
    )(*arguments)


def resident(array: jax.Array) -> pl.BlockSpec:
    """Returns the whole array, read once and kept in one buffer."""
    return pl.BlockSpec(
        array.shape,
        lambda i, j: (0,) * array.ndim,
        pipeline_mode=pl.Buffered(buffer_count=1),
    )


def head_groups(spec: LayerSpec) -> list[HeadGroup]:
    """Returns the heads in groups that fill the lanes of a register."""
    heads = max(1, min(spec.heads, LANES // spec.head_width))
    width = heads * spec.head_width
    return [HeadGroup(first, heads, width) for first in range(0, spec.heads, heads)]


def head_indicator(spec: LayerSpec) -> jax.Array:
    """Returns [H E, H] with 1 where a column of all heads belongs to a head."""
    shape = (spec.heads * spec.head_width, spec.heads)
    of_column = jax.lax.broadcasted_iota(jnp.int32, shape, 0) // spec.head_width
    head = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (of_column == head).astype(jnp.float32)


def slopes_row(spec: LayerSpec) -> jax.Array:
    """Returns ALiBi's slopes [1, H], zeros without ALiBi."""
    head = jax.lax.broadcasted_iota(jnp.int32, (1, spec.heads), 1)
    if spec.alibi_max_bias is None:
        return jnp.zeros((1, spec.heads), jnp.float32)
    rate = -spec.alibi_max_bias / spec.heads
    return jnp.exp2(rate * (head + 1).astype(jnp.float32))


def norm_rows(x: jax.Array, scale_ref, shift_ref, kind: str, eps: float) -> jax.Array:
    """Normalises float32 rows [R, N]; scale and shift are [1, N]."""
    if kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    if kind != "none":
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale_ref[...] + shift_ref[...]


def dot(a: jax.Array, b: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Multiplies a b, or a b^T; float32 operands exactly, accumulating in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
