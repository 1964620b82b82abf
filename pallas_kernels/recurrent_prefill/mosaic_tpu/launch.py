"""Launch of the TPU kernels: block sizes, VMEM, and shared arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.call import Array, LayerSpec, LayerWeights
from pallas_kernels.recurrent_prefill.equations import Rotary
from pallas_kernels.recurrent_prefill.tiles.layout import Tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Sizes of one layer's call: widths in elements, `bytes` of a weight."""

    batch: int
    positions: int
    width: int
    heads: int
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
            heads=spec.heads,
            heads_width=spec.heads * spec.head_width,
            inner_width=weights.w_up.shape[2],
            gated=weights.w_gate is not None,
            bytes=jnp.dtype(spec.dtype).itemsize,
        )

    @property
    def pre_width(self) -> int:
        """Width of the MLP's first product."""
        return self.inner_width * (2 if self.gated else 1)

    @property
    def weights(self) -> int:
        """Bytes of the matrices that stay in VMEM."""
        D, HE, F = self.width, self.heads_width, self.inner_width
        return self.bytes * (3 * HE * D + D * self.pre_width + F * D)

    @property
    def lanes(self) -> int:
        """Lanes of numbers by head, in full registers."""
        return -(-COPIES * self.heads // LANES) * LANES


SLACK = 2 * 2**20
"""What a kernel may take above its estimate, out of what the compiler keeps: on a TPU7x
it takes 3 % more than on a v5p, for which the estimates are."""


def choose_tiles(
    sizes: LayerSizes,
    tile: int | None,
    vmem: int,
    needed: Callable,
    rows: int | None = None,
) -> Tiles:
    """Returns the rows that take the least time of those that fit `vmem` bytes.

    Args:
      tile: overrides its positions.
      needed: the estimate of the pass, `forward_bytes` or `backward_bytes`.
      rows: overrides the choice.
    """
    if tile is None:
        tile = 16 if sizes.positions < LONG else 32
    tried = ROWS if rows is None else (rows,)
    choices = [Tiles(tile=tile, rows=rows, keys=CHUNK) for rows in tried]
    fitting = [tiles for tiles in choices if needed(sizes, tiles) <= vmem]
    programs = lambda tiles: -(-sizes.batch // tiles.rows)  # noqa: E731
    return min(
        fitting or choices[-1:],
        key=lambda tiles: programs(tiles) * (tiles.rows + AS_ROWS),
    )


def forward_bytes(sizes: LayerSizes, tiles: Tiles) -> int:
    """Estimates what the forward kernel holds in VMEM."""
    D, HE, b, rows = sizes.width, sizes.heads_width, tiles.tile, tiles.rows
    few = block_of_rows(rows, 16)
    state = 4 * (HE + 2 * sizes.lanes)
    tile = b * rows * (2 * sizes.bytes * HE + state)
    on_their_way = sizes.bytes * HE * 2 * (PAIR * (BUFFERS * tiles.keys + b) + few * b)
    # Blocks are double-buffered. Other values of a position spill to VMEM if there are
    # too few registers.
    position = rows * 2 * (4 * (2 * D + sizes.lanes) + sizes.bytes * 4 * HE)
    between = rows * 4 * (4 * D + 4 * HE + 4 * COLUMNS)
    return sizes.weights + tile + few * b * state + on_their_way + position + between


def backward_bytes(sizes: LayerSizes, tiles: Tiles) -> int:
    """Estimates what the backward kernel holds in VMEM."""
    D, HE, b, rows = sizes.width, sizes.heads_width, tiles.tile, tiles.rows
    tile = b * rows * 3 * (sizes.bytes * HE + 4 * sizes.lanes)
    position = rows * 2 * (4 * (7 * D + 5 * HE + 3 * LANES))
    position += rows * 2 * sizes.bytes * (4 * HE + 2 * sizes.pre_width)
    between = rows * 4 * (6 * D + 4 * HE + 4 * COLUMNS)
    return sizes.weights + tile + position + between


def refusal_of_sizes(
    sizes: LayerSizes, tile: int | None, vmem: int, rows: int | None = None
) -> str | None:
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
    if rows is not None and rows not in ROWS:
        return f"runs {', '.join(map(str, ROWS))} rows per program, got rows={rows}"
    needed = max(
        estimate(sizes, choose_tiles(sizes, tile, vmem, estimate, rows))
        for estimate in (forward_bytes, backward_bytes)
    )
    if needed > vmem:
        return (
            f"weights and a tile of {rows or ROWS[-1]} rows must fit {vmem >> 20} MiB "
            f"of VMEM, got {needed >> 20} MiB"
        )
    return None


ROWS = (128, 64, 32, 16, 8)
"""Rows of the batch that a program may have."""
AS_ROWS = 24
"""What a position costs a program whatever its rows, in rows: handing the weights to
the matrix unit. Compiled for v5e at D 1024, 32 rows take 9.5, 64 take 14.7 and 128 take
25.6 thousand cycles."""
LONG = 1024
"""Positions from which on tiles have 32 of them: the prefix, read once a tile, then
costs more than what longer tiles add to the reading of the own tile."""
COLUMNS = 512
"""Columns of the MLP that are computed at once, at most."""
LANES = 128
"""Width of a vector register."""
CHUNK = LANES
"""Pairs of the prefix that are read at once: their logits are as wide as a register."""
NEAR = 4
"""Positions of the own tile that a step reads at once; divides every tile."""
OWN_ROWS = 64
"""Rows that read the own tile at once, at most."""
PAIR = 2
"""Rows that read their prefixes together: what one waits for, the other fills."""
BUFFERS = 4
"""Chunks of the prefix in VMEM: one that is read and those on their way to it."""
COPIES = 3
"""Lanes of a head among numbers by head: one for each bfloat16 part of a float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The settings that all kernels of a call share.

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
    names = jax.tree.structure((arguments, out_shape, scratch_shapes))

    def body(*refs):
        kernel(*jax.tree.unflatten(names, refs), **static)

    out = pl.pallas_call(
        body,
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        scratch_shapes=jax.tree.leaves(scratch_shapes),
        interpret=launch.interpret,
        compiler_params=pltpu.CompilerParams(
            # Row tiles share nothing: the two cores of a v5p take turns. A row tile's
            # sequence is in one core's scratch.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=launch.vmem + SLACK,
        ),
        name=kernel.__name__.strip("_"),
    )(*jax.tree.leaves(arguments))
    return type(out_shape)(*out)


def resident(array: jax.Array) -> pl.BlockSpec:
    """Returns the full array, read once and kept in one buffer."""
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


def block_of_rows(rows: int, most: int) -> int:
    """Returns how many of a program's rows go together, a power of two up to `most`."""
    return min(rows, most)


def block_of_columns(width: int) -> int:
    """Returns how many of the MLP's columns go together, a divisor of all of them."""
    return max(part for part in range(1, min(width, COLUMNS) + 1) if width % part == 0)


def head_indicator(spec: LayerSpec) -> Float[Array, "HE lanes"]:
    """Returns [H E, COPIES H], 1 where lane l and a column are of one head, l mod H.

    Lanes beyond H repeat the heads, each for one part of what it repeats over a head's
    columns (`HeadSums.repeat`); the matrix unit computes 128 of them anyhow.
    """
    of_column = jnp.arange(spec.heads * spec.head_width) // spec.head_width
    head = jnp.arange(COPIES * spec.heads) % spec.heads
    return (of_column[:, None] == head).astype(jnp.bfloat16)


class HeadSums(NamedTuple):
    """Sums over each head's columns, and numbers repeated over them, in float32.

    Both are products with `indicator`, which is exact in bfloat16. So one pass of the
    matrix unit a part is enough where the other operand is a sum of bfloat16 parts; a
    float32 product at full precision takes six. A part takes 8 of the 24 bits that a
    float32 has.
    """

    indicator: Any  # ref of `head_indicator`'s
    spec: LayerSpec

    def sums(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        """Sums [..., H E] over each head, [..., COPIES H]; `products` of two operands.

        A product of two bfloat16 values has 16 bits: two parts are all of it.
        """
        count = 2 if self.spec.dtype == "bfloat16" else 3
        flat = products.reshape(-1, products.shape[-1])
        # One below the other, so that the indicator is pushed once for all.
        stacked = dot(jnp.concatenate(_parts(flat, count)), self.indicator[...])
        parts = stacked.reshape(count, *products.shape[:-1], -1)
        return jnp.sum(parts, axis=0)

    def repeat(self, numbers: Float[Array, "..."]) -> Float[Array, "..."]:
        """Repeats [..., COPIES H] over each head's columns, [..., H E]: all 24 bits.

        A number's three parts stand in the lanes of its three copies, which one product
        adds up.
        """
        flat = numbers.reshape(-1, numbers.shape[-1])
        copy = jax.lax.broadcasted_iota(jnp.int32, flat.shape, 1) // self.spec.heads
        high, middle, low = _parts(flat, COPIES)
        part = jnp.where(copy == 0, high, jnp.where(copy == 1, middle, low))
        wide = dot(part, self.indicator[...], transposed=True)
        return wide.reshape(*numbers.shape[:-1], -1)


def _parts(x: Float[Array, "N M"], count: int) -> list[Float[Array, "N M"]]:
    """Cuts float32 into bfloat16 parts, 8 bits each from the highest on."""
    parts = []
    for _ in range(count - 1):
        # The upper half of a float32 is a bfloat16. By its bits, since a compiler may
        # drop a conversion there and back.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return [*parts, x.astype(jnp.bfloat16)]


def alibi_slopes(spec: LayerSpec, head: Int[Array, "..."]) -> Float[Array, "..."]:
    """Returns ALiBi's slopes of heads, zeros without ALiBi."""
    if spec.alibi_max_bias is None:
        return jnp.zeros(head.shape, jnp.float32)
    rate = -spec.alibi_max_bias / spec.heads
    return jnp.exp2(rate * (head + 1).astype(jnp.float32))


def slopes_row(spec: LayerSpec, lanes: int) -> Float[Array, "1 lanes"]:
    """Returns ALiBi's slopes by lane as `head_indicator` has them, [1, lanes]."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
    return alibi_slopes(spec, jax.lax.rem(lane, spec.heads))


def norm_rows(
    x: Float[Array, "rows N"], scale_ref, shift_ref, kind: str, eps: float
) -> Float[Array, "rows N"]:
    """Normalises float32 rows [block_b, N]; scale and shift are [1, N]."""
    if kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    if kind != "none":
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale_ref[...] + shift_ref[...]


def rotary_tables(
    rotary: Rotary | None, spec: LayerSpec
) -> tuple[Float[Array, "... HE"], Float[Array, "... HE"]] | None:
    """Returns cos and sin of each of the heads' columns, as `rotate` reads them.

    A column's sine has the sign with which its partner enters; those that do not turn
    have 1 and 0.
    """
    if rotary is None:
        return None
    cos, sin = (part[..., 0, :] for part in rotary)
    rest = jnp.zeros((*cos.shape[:-1], spec.head_width - spec.rope_width), cos.dtype)
    tables = [[cos, cos, rest + 1.0], [-sin, sin, rest]]
    cos, sin = (jnp.concatenate(parts * spec.heads, axis=-1) for parts in tables)
    return cos, sin


def rotate(x: Float[Array, "rows HE"], cos, sin, spec: LayerSpec) -> Array:
    """Rotates float32 rows of heads; the transposed rotation with the sines negated.

    Channel i of a head turns with channel i + rope_width / 2.
    """
    half, width = spec.rope_width // 2, x.shape[1]
    channel = jax.lax.rem(
        jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), spec.head_width
    )
    above, below = (pltpu.roll(x, shift, 1) for shift in (width - half, half))
    return x * cos + jnp.where(channel < half, above, below) * sin


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
