"""The persistent kernel's inputs, outputs and on-chip arrays, by name.

Rows B are padded to full blocks of 64; P is the number of programs, V of those that one
instance of the grid plays, C a program's columns, G the groups of a stage.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from experiments.recurrent_transformer.hopper.blocks import swizzled
from experiments.recurrent_transformer.hopper.launch import (
    CHUNK,
    RING,
    SIDE,
    Launch,
    Stage,
    WidthCut,
    slopes_of,
)
from pallas_kernels.recurrent_prefill.call import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import PreparedWeights


class Resident(NamedTuple):
    """A layer's weights as the kernel multiplies them, program after program.

    A norm's scale is folded into the next weight and its shift into that product's
    bias: rows are multiplied as they are, and each result by its row's factor.
    """

    weights: Array  # [P, C, D], bfloat16: a program's columns of its weight, turned
    biases: Array  # [P, C], float32
    counted: Array  # [P, C]: 1 where no earlier group has the column, else 0
    k_scale: Array  # [H E], of the k-norm
    k_shift: Array  # [H E]
    slopes: Array  # [H], ALiBi's

    @classmethod
    def of(cls, w: PreparedWeights, spec: LayerSpec, cut: WidthCut) -> "Resident":
        """Folds the norms into one layer's weights [1, N, M], which are float32."""
        source = w.attention_norm if spec.normed_persistent else (None, None)
        w_kv, b_kv = _fold(w.w_kv, w.b_kv, source)
        k_width = w_kv.shape[1] // 2
        folded = (
            _fold(w.w_out, w.b_out, (None, None)),
            _fold(w.w_in, w.b_in, w.mlp_norm),
            _fold(w.w_down, w.b_down, (None, None)),
            (w_kv[:, :k_width], b_kv[:k_width]),
            (w_kv[:, k_width:], b_kv[k_width:]),
        )
        blocks = zip(
            *(
                _blocks(cut, stage, weight, bias)
                for stage, (weight, bias) in zip(cut.stages, folded, strict=True)
            ),
            strict=True,
        )
        scale, shift = w.k_norm
        weights, biases, counted = map(jnp.concatenate, blocks)
        return cls(
            *(weights, biases, counted),
            k_scale=jnp.ones(k_width) if scale is None else scale[0],
            k_shift=jnp.zeros(k_width) if shift is None else shift[0],
            slopes=slopes_of(spec),
        )


def _blocks(
    cut: WidthCut, stage: Stage, weight: Float[Array, "N M"], bias: Float[Array, " M"]
) -> tuple[Float[Array, "p C D"], Float[Array, "p C"], Float[Array, "p C"]]:
    """Returns what each program of a stage has of its weight and bias, and counts."""
    starts, C = jnp.array(cut.starts(stage)), cut.columns
    columns = starts[:, None] + jnp.arange(C)  # [G, C]
    parts = weight.T[columns].reshape(stage.groups, C, stage.parts, cut.depth)
    counted = columns >= C * jnp.arange(stage.groups)[:, None]
    weights = parts.swapaxes(1, 2).reshape(-1, C, cut.depth)
    every_part = partial(jnp.repeat, repeats=stage.parts, axis=0)
    return weights, every_part(bias[columns]), every_part(counted.astype(jnp.float32))


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


class TileInputs(NamedTuple):
    """The kernel's inputs for a tile: its rows, and the softmax after its prefix."""

    q: Any  # [b, B, H E]
    x: Any  # [b, B, D], float32
    largest: Any  # [b, H, B], float32, as the two below
    normalizer: Any  # [b, H, B]
    weighted: Any  # [b, B, H E]


class TileOutputs(NamedTuple):
    """The kernel's outputs, and from `raw_k` on what programs exchange."""

    z: Any  # [b, B, D], float32
    attended: Any  # [b, B, H E]
    lse: Any  # [b, H, B], float32
    keys: Any  # [b, B, H E], but for the last position's
    values: Any  # [b, B, H E]
    raw_k: Any  # [B, H E], float32: the newest key before its norm
    y: Any  # [B, D], float32
    rows: Any  # [B, D + F + D], what is multiplied: y, the hidden rows, z
    partial: Any  # [G, F / D, B, C], float32: a part of the product with w_down
    squares: Any  # [3, G, B], of a group's columns of y, z and the raw keys

    @classmethod
    def shapes(cls, launch: Launch, x: Array) -> "TileOutputs":
        """Returns the shapes for a tile x [b, B, D]."""
        b, B, D = x.shape
        H, cut = launch.spec.heads, launch.cut
        HE, G = H * launch.spec.head_width, cut.down.groups
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
            rows=half(B, (2 + cut.down.parts) * D),
            partial=wide(G, cut.down.parts, B, cut.columns),
            squares=wide(3, G, B),
        )


class TileScratch(NamedTuple):
    """A program's shared memory, which lasts for the tile."""

    held: Any  # [V, C, D], the program's block of a weight
    ring: Any  # [workers, RING, 64, CHUNK], chunks of rows on their way to a worker
    loaded: Any  # the barrier of the weight
    arrived: Any  # a barrier for each chunk of the ring

    @classmethod
    def shapes(cls, launch: Launch) -> "TileScratch":
        """Returns the memory that a launch needs."""
        cut, workers = launch.cut, launch.workers
        held = swizzled(launch.played, cut.columns, cut.depth)
        if launch.interpret:  # See `turned`.
            held = plgpu.SMEM((launch.played, cut.depth, cut.columns), jnp.bfloat16)
        return cls(
            held=held,
            ring=swizzled(workers, RING, SIDE, CHUNK),
            loaded=plgpu.Barrier(),
            arrived=plgpu.Barrier(num_barriers=workers * RING),
        )


class Refs(NamedTuple):
    """All that a program may touch."""

    inputs: TileInputs
    layer: Resident
    outputs: TileOutputs
    scratch: TileScratch
