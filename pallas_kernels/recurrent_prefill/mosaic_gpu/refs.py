"""What the persistent kernel reads, writes and holds on chip, by name.

Rows are padded to whole blocks of 64; P is the number of programs, V of those that one
instance of the grid plays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import Prepared
from pallas_kernels.recurrent_prefill.mosaic_gpu.blocks import (
    swizzled,
)
from pallas_kernels.recurrent_prefill.mosaic_gpu.launch import (
    RING,
    SIDE,
    Launch,
)


class Resident(NamedTuple):
    """A layer's weights as the kernel multiplies them.

    A norm's scale stands in the weight behind it and its shift in that product's bias:
    rows are multiplied as they are, and each result by its row's factor.
    """

    w_out: Array  # [H E, D], bfloat16
    w_in: Array  # [D, F]
    w_down: Array  # [F, D]
    w_kv: Array  # [D, 2 H E]: keys, then values
    b_out: Array  # [D], float32
    b_in: Array  # [F]
    b_down: Array  # [D]
    b_kv: Array  # [2 H E]
    k_scale: Array  # [H E], of the k-norm
    k_shift: Array  # [H E]
    slopes: Array  # [H], ALiBi's

    @classmethod
    def of(cls, w: Prepared, spec: LayerSpec) -> "Resident":
        """Folds the norms into one layer's weights [1, N, M], which are float32."""
        source = w.attention_norm if spec.normed_persistent else (None, None)
        w_in, b_in = _fold(w.w_in, w.b_in, w.mlp_norm)
        w_kv, b_kv = _fold(w.w_kv, w.b_kv, source)
        w_out, b_out = _fold(w.w_out, w.b_out, (None, None))
        w_down, b_down = _fold(w.w_down, w.b_down, (None, None))
        k_width = w_kv.shape[1] // 2
        scale, shift = w.k_norm
        return cls(
            *(w_out, w_in, w_down, w_kv, b_out, b_in, b_down, b_kv),
            k_scale=jnp.ones(k_width) if scale is None else scale[0],
            k_shift=jnp.zeros(k_width) if shift is None else shift[0],
            slopes=_slopes(spec),
        )


def _fold(
    weight: Float[Array, "1 N M"], bias: Array | None, norm: tuple[Any, Any]
) -> tuple[Float[Array, "N M"], Float[Array, " M"]]:
    (weight,), (scale, shift) = weight, norm
    total = jnp.zeros(weight.shape[1]) if bias is None else bias[0]
    if shift is not None:
        total = total + jnp.dot(shift[0], weight, precision=jax.lax.Precision.HIGHEST)
    if scale is not None:
        weight = weight * scale[0][:, None]
    return weight.astype(jnp.bfloat16), total


def _slopes(spec: LayerSpec) -> Float[Array, " H"]:
    m = spec.alibi_max_bias
    if m is None:
        return jnp.zeros(spec.heads)
    return jnp.exp2(-m / spec.heads * jnp.arange(1.0, spec.heads + 1))


class TileInputs(NamedTuple):
    """What the kernel reads of a tile: its rows, and the softmax after its prefix."""

    q: Any  # [b, B, H E]
    x: Any  # [b, B, D], float32
    largest: Any  # [b, H, B], float32, as the two below
    normalizer: Any  # [b, H, B]
    weighted: Any  # [b, B, H E]


class TileOutputs(NamedTuple):
    """What the kernel writes, and from `raw_k` on what programs tell one another."""

    z: Any  # [b, B, D], float32
    attended: Any  # [b, B, H E]
    lse: Any  # [b, H, B], float32
    keys: Any  # [b, B, H E], but for the last position's
    values: Any  # [b, B, H E]
    raw_k: Any  # [B, H E], float32: the newest key before its norm
    y: Any  # [B, D], float32
    y_rows: Any  # [B, D], what is multiplied of it
    hidden: Any  # [B, F]
    z_rows: Any  # [B, D]
    partial: Any  # [P, B, 64], float32: a program's part of a product
    squares: Any  # [P, B], of the rows that it multiplied
    k_squares: Any  # [P, B], of the raw keys that it finished

    @classmethod
    def shapes(cls, launch: Launch, x: Array, inner: int) -> "TileOutputs":
        """Returns the shapes for a tile x [b, B, D]."""
        b, B, D = x.shape
        H, P = launch.spec.heads, launch.programs
        HE = H * launch.spec.head_width
        wide = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
        return cls(
            z=wide(b, B, D),
            attended=half(b, B, HE),
            lse=wide(b, H, B),
            keys=half(b, B, HE),
            values=half(b, B, HE),
            raw_k=wide(B, HE),
            y=wide(B, D),
            y_rows=half(B, D),
            hidden=half(B, inner),
            z_rows=half(B, D),
            partial=wide(P, B, SIDE),
            squares=wide(P, B),
            k_squares=wide(P, B),
        )


class TileScratch(NamedTuple):
    """A program's shared memory, which lasts for the tile."""

    w_out: Any  # [V, depth, 64]: the program's part of each weight
    w_in: Any
    w_down: Any
    w_kv: Any
    out: Any  # [64, columns]: what it finished of each product, on its way to memory
    up: Any
    down: Any
    pair: Any
    ring: Any  # [RING, 64, 64], blocks of activations
    arrived: Any  # a barrier for each of them
    head: Any  # [64, 64], a key or attended values, on their way to memory
    loaded: Any  # the barrier of a weight

    @classmethod
    def shapes(cls, launch: Launch) -> "TileScratch":
        """Returns the memory that a launch needs."""
        held = (swizzled(launch.played, one.depth, SIDE) for one in launch.shares)
        finished = (
            plgpu.SMEM((SIDE, one.columns), jnp.bfloat16) for one in launch.shares
        )
        return cls(
            *held,
            *finished,
            ring=swizzled(RING, SIDE, SIDE),
            arrived=plgpu.Barrier(num_barriers=RING),
            head=swizzled(SIDE, SIDE),
            loaded=plgpu.Barrier(),
        )


class Refs(NamedTuple):
    """All that a program may touch."""

    inputs: TileInputs
    layer: Resident
    outputs: TileOutputs
    scratch: TileScratch
