"""A program's stage: its columns of one of the layer's products, and what follows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from experiments.recurrent_transformer.hopper.blocks import (
    BY_COLUMN,
    BY_ROW,
    over_columns,
    over_rows,
    read,
    turned,
)
from experiments.recurrent_transformer.hopper.launch import (
    CHUNK,
    OUT,
    PAIR,
    RING,
    SIDE,
    Launch,
    Stage,
    choose,
)
from experiments.recurrent_transformer.hopper.refs import Refs
from pallas_kernels.recurrent_prefill.call import Array
from pallas_kernels.recurrent_prefill.equations import activate_in_kernel

Y_SQUARES, Z_SQUARES, KEY_SQUARES = range(3)


class RowWorker(NamedTuple):
    """Who does a task: a program, the place of its weight, and which of its workers."""

    program: Any
    played: Any  # in `TileScratch.held`
    number: Any  # of the program's workers


class Role(NamedTuple):
    """A program's role, numbers that it computes when it runs."""

    stage: Any  # 0 to 4, in the order of `WidthCut.stages`
    group: Any
    part: Any
    start: Any  # the group's first column
    kind: Any  # what the stage writes: OUT to PAIR

    @classmethod
    def of(cls, launch: Launch, program: Any) -> "Role":
        stages = launch.cut.stages
        stage = sum((program >= s.first).astype(jnp.int32) for s in stages[1:])

        def per_worker(of: Callable[[Stage], int]) -> Any:
            return choose(stage, [of(s) for s in stages])

        n, parts = (
            program - per_worker(lambda s: s.first),
            per_worker(lambda s: s.parts),
        )
        group = n // parts
        last = per_worker(lambda s: s.width) - launch.cut.columns
        start = jnp.minimum(group * launch.cut.columns, last)
        kind = jnp.minimum(stage + OUT, PAIR)
        return cls(stage, group, n % parts, start, kind)


def multiply(
    launch: Launch, refs: Refs, role: Role, worker: RowWorker, t, block
) -> Float[Array, "64 C"]:
    """Multiplies a block of rows at position t by a program's block of its weight."""
    cut, scratch, outputs = launch.cut, refs.scratch, refs.outputs
    chunks = cut.depth // CHUNK
    rows = pl.ds(block * SIDE, launch.loaded)
    z = 1 + cut.down.parts
    # In units of D; attended values are elsewhere.
    source = choose(role.stage, [0, 0, 1, z, z]) + role.part

    def fetch(n) -> None:
        slot, columns = n % RING, pl.ds(n * CHUNK, CHUNK)
        target = scratch.ring.at[worker.number, slot, pl.ds(0, launch.loaded)]
        arrived = scratch.arrived.at[worker.number * RING + slot]

        @pl.when(role.stage == 0)
        def _():
            attended = outputs.attended.at[t, rows, columns]
            plgpu.copy_gmem_to_smem(attended, target, arrived)

        @pl.when(role.stage > 0)
        def _():
            columns = pl.ds(source * cut.depth + n * CHUNK, CHUNK)
            plgpu.copy_gmem_to_smem(outputs.rows.at[rows, columns], target, arrived)

    for n in range(min(RING - 1, chunks)):
        fetch(jnp.int32(n))

    def accumulate(sum_ref):
        @pl.loop(0, chunks)
        def _(n):
            slot = n % RING
            plgpu.barrier_wait(scratch.arrived.at[worker.number * RING + slot])
            weight = turned(launch, scratch.held.at[worker.played], n)
            plgpu.wgmma(sum_ref, scratch.ring.at[worker.number, slot], weight)
            # The chunk before this one has been multiplied: its place is free.
            plgpu.wgmma_wait(1)
            pl.when(n + RING - 1 < chunks)(lambda: fetch(n + RING - 1))

        plgpu.wgmma_wait(0)
        return sum_ref[...]

    return pl.run_scoped(accumulate, plgpu.ACC((SIDE, cut.columns), jnp.float32))


def finish(
    launch: Launch,
    refs: Refs,
    role: Role,
    worker: RowWorker,
    t,
    block,
    result: Float[Array, "64 C"],
) -> None:
    """Writes what follows from a program's columns of a product."""
    spec, cut, outputs = launch.spec, launch.cut, refs.outputs
    width, parts = cut.columns, cut.down.parts
    rows, columns = pl.ds(block * SIDE, SIDE), pl.ds(role.start, width)

    def of_program(vectors: Any) -> Float[Array, "64 C"]:
        vector = read(launch, vectors, worker.program, slice(None), layout=BY_COLUMN)
        return over_rows(vector)

    def biased(normed: int | None = None) -> Float[Array, "64 C"]:
        """Returns the product, of rows normalised by their squares if any."""
        scaled = result
        if normed is not None:
            eps = spec.norm_eps
            factor = row_factors(launch, refs, normed, rows, eps)
            scaled = result * over_columns(factor, width)
        return scaled + of_program(refs.layer.biases)

    def squared(which: int, value: Float[Array, "64 C"]) -> None:
        squares = value * value * of_program(refs.layer.counted)
        outputs.squares[which, role.group, rows] = jnp.sum(squares, axis=1)

    def leave(value: Float[Array, "64 C"], column: int) -> None:
        """Hands rows on to the next stage."""
        place = pl.ds(column + role.start, width)
        outputs.rows[rows, place] = value.astype(outputs.rows.dtype)

    def summed() -> Float[Array, "64 C"]:
        """Adds up the group's parts, whoever does it in the same order."""

        def add(n, total):
            where = role.group, n, rows, slice(None)
            return total + jax.lax.cond(
                role.part == n,
                lambda: result,
                lambda: read(launch, outputs.partial, *where),
            )

        return jax.lax.fori_loop(0, parts, add, jnp.zeros_like(result))

    D = cut.depth

    @pl.when(role.stage == 0)
    def _():
        x = read(launch, refs.inputs.x, t, rows, columns)
        y = x + spec.residual_scale * biased()
        outputs.y[rows, columns] = y
        squared(Y_SQUARES, y)
        leave(y, 0)

    @pl.when(role.stage == 1)
    def _():
        normed = Y_SQUARES if spec.norm == "rms" else None
        leave(activate_in_kernel(biased(normed), spec.activation), D)

    adds_up = launch.adds_up(role.part, block)

    @pl.when((role.stage == 2) & ~adds_up)
    def _():
        outputs.partial[role.group, role.part, rows] = result

    @pl.when((role.stage == 2) & adds_up)
    def _():
        y = read(launch, outputs.y, rows, columns)
        branch = summed() + of_program(refs.layer.biases)
        z = y + spec.residual_scale * branch
        outputs.z[t, rows, columns] = z
        squared(Z_SQUARES, z)
        leave(z, (1 + parts) * D)

    source = Z_SQUARES if spec.norm == "rms" and spec.normed_persistent else None

    @pl.when(role.stage == 3)
    def _():
        k = biased(source)
        outputs.raw_k[rows, columns] = k
        squared(KEY_SQUARES, k)

    @pl.when(role.stage == 4)
    def _():
        value = biased(source).astype(outputs.values.dtype)
        outputs.values[t, rows, columns] = value


def row_factors(
    launch: Launch, refs: Refs, which: int, rows, eps: float
) -> Float[Array, " rows"]:
    """Returns what a root mean square norm multiplies rows by, from their squares."""
    squares = refs.outputs.squares
    total = read(launch, squares, which, 0, rows, layout=BY_ROW)
    for group in range(1, launch.cut.down.groups):
        total = total + read(launch, squares, which, group, rows, layout=BY_ROW)
    return jax.lax.rsqrt(total / launch.cut.depth + eps)
