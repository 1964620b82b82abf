"""A tile's loop over positions as one persistent kernel, its weights on chip."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxtyping import Float

from experiments.recurrent_transformer.hopper.attention import attend
from experiments.recurrent_transformer.hopper.launch import (
    ATTENDED,
    DOWN,
    KINDS,
    PARTS,
    Arrivals,
    Launch,
)
from experiments.recurrent_transformer.hopper.products import (
    Role,
    RowWorker,
    finish,
    multiply,
)
from experiments.recurrent_transformer.hopper.refs import (
    Refs,
    Resident,
    TileInputs,
    TileOutputs,
    TileScratch,
)
from pallas_kernels.recurrent_prefill.call import Array
from pallas_kernels.recurrent_prefill.equations import NormParameters, norm_and_rotate

INSTANCE = "instance"
"""The grid's axis."""
WORKER = "worker"
"""The axis of an instance's warpgroups."""
_APART = 32
"""Counters between two that are used: each has a line of the cache of its own."""


class _TileStages(NamedTuple):
    """The results of a tile's positions."""

    z: Float[Array, "b B D"]
    attended: Float[Array, "b B HE"]
    lse: Float[Array, "b H B"]
    keys: Float[Array, "b B HE"]
    values: Float[Array, "b B HE"]


def run_tile(
    launch: Launch,
    resident: Resident,
    x: Float[Array, "b B D"],
    q: Float[Array, "b B HE"],
    running: tuple[Array, Array, Array],
    k_norm: NormParameters,
) -> _TileStages:
    """Runs a tile's positions.

    Args:
      running: the softmax of q after the tile's prefix: largest logit, normalizer and
        weighted values.
    """
    if launch.interpret:  # See `turned`.
        resident = resident._replace(weights=resident.weights.swapaxes(1, 2))
    out = _launch(
        launch,
        lambda *refs: _tile_kernel(launch, Refs(*refs), x.shape[0]),
        TileInputs(q, x, *running),
        resident,
        out_shape=TileOutputs.shapes(launch, x),
        scratch=TileScratch.shapes(launch),
    )
    # The step that would have finished the last position's key never came.
    last = norm_and_rotate(out.raw_k[None], k_norm, None, launch.spec)
    last = last.reshape(out.raw_k.shape).astype(out.keys.dtype)
    keys = out.keys.at[-1].set(last)
    return _TileStages(out.z, out.attended, out.lse, keys, out.values)


def _launch(
    launch: Launch, kernel: Callable, *arguments: Any, out_shape: Any, scratch: Any
) -> Any:
    """Runs a kernel body on all instances at once.

    Args:
      kernel: gets NamedTuples of refs of these arguments' types:
      arguments, out_shape, scratch: NamedTuples of arrays, shapes, shared memory.

    Returns:
      The outputs, in the type of `out_shape`.
    """
    groups = (*arguments, out_shape, scratch)

    def body(*refs):
        rest = iter(refs)
        kernel(*(type(group)(*(next(rest) for _ in group)) for group in groups))

    params = plgpu.CompilerParams(
        # Layouts of most values follow from those of what is read, which the compiler
        # infers with the semantics of a full warpgroup.
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        # Sums stay within a warp; both warpgroups would have the same memory for them.
        reduction_scratch_bytes=0,
    )
    workers = {"num_threads": launch.workers, "thread_name": WORKER}
    out = plgpu.kernel(
        body,
        out_type=list(out_shape),
        scratch_types=list(scratch),
        grid=(launch.instances,),
        grid_names=(INSTANCE,),
        kernel_name="recurrent_tile",
        interpret=launch.interpret,
        compiler_params=params,
        **({} if launch.interpret else workers),
    )(*(array for group in arguments for array in group))
    return type(out_shape)(*out)


class Counters(NamedTuple):
    """Signals between workers about blocks of rows: counters in memory that only grow.

    A block has one for each of KINDS, which a position raises by
    `launch.arrivals(kind)`.
    """

    launch: Launch
    arrivals: Any  # [KINDS * blocks * _APART], none where one worker does all

    @classmethod
    def open(cls, launch: Launch) -> "Counters":
        if launch.instances == 1:
            return cls(launch, None)
        count = len(KINDS) * launch.blocks * _APART
        counters = plgpu.SemaphoreType.REGULAR((count,))
        return cls(launch, pl.get_global(counters))

    def tell(self, kind, block) -> None:
        """Tells of what was written; a signal releases it."""
        if self.arrivals is not None:
            _order_copies()
            plgpu.semaphore_signal(self._of(kind, block), memory_scope="gpu")

    def wait(self, until: Arrivals, block) -> None:
        """Waits until a block's counter reaches a value; earlier writes are visible."""
        if self.arrivals is not None:
            counter = self._of(until.kind, block)
            times = until.times
            plgpu.semaphore_wait(counter, times, decrement=False, memory_scope="gpu")
            _order_copies()

    def _of(self, kind, block) -> Any:
        return self.arrivals.at[(kind * self.launch.blocks + block) * _APART]


def _order_copies() -> None:
    """Orders a thread's own reads and writes of memory with those of copy engines.

    Rows are written plainly and copied on chip by other programs: to the engine, which
    is another proxy, neither a release nor an acquire says anything (PTX ISA, "Memory
    Consistency Model", proxies).
    """
    emit: Any = plgpu.inline_mgpu()(_fence)
    emit()


def _fence(_) -> None:
    text = ir.StringAttr.get("fence.proxy.async.global;")
    ir.Operation.create(
        "llvm.inline_asm",
        results=[ir.Type.parse("!llvm.void")],
        attributes={
            "asm_string": text,
            "constraints": ir.StringAttr.get(""),
            "has_side_effects": ir.UnitAttr.get(),
        },
    )


# A program holds its block of a weight for the tile. Each of its workers goes through
# the ticks: it attends for some heads of one block of rows, and takes its stage of
# another. What crosses memory, the second level of cache in practice: rows to every
# program of the stage that multiplies them, a tile's earlier pairs, the parts of the
# product with w_down; x, q, softmax state, z, attended values and pairs once.
def _tile_kernel(launch: Launch, refs: Refs, count: int) -> None:
    counters, each = Counters.open(launch), _player(launch)
    each(lambda worker: _hold_weight(refs, worker))

    # One instance alone plays the parts of w_down before the programs that add them up.
    passes = (None,) if launch.played == 1 else (False, True)

    @pl.loop(0, launch.ticks(count))
    def _(tick):
        state = launch, refs, counters
        each(lambda worker: _attention_task(*state, worker, tick, count))
        for adding in passes:
            each(lambda worker: _product_task(*state, worker, tick, count, adding))  # noqa: B023


def _hold_weight(refs: Refs, worker: RowWorker) -> None:
    loaded, held = refs.scratch.loaded, refs.scratch.held.at[worker.played]
    weights: Any = refs.layer.weights
    weight = weights.at[worker.program]
    pl.when(worker.number == 0)(lambda: plgpu.copy_gmem_to_smem(weight, held, loaded))
    plgpu.barrier_wait(loaded)


def _attention_task(
    launch, refs, counters, worker: RowWorker, tick, count: int
) -> None:
    t, block, there = launch.task(tick, ATTENDED, count)
    number = worker.number * launch.cut.programs + worker.program
    first, heads = launch.first_head(block, number), launch.spec.heads

    @pl.when(there & (first < heads))
    def _():
        counters.wait(launch.before_attention(t), block)

        @pl.loop(0, -(-heads // launch.all_workers))
        def _(n):
            head = first + n * launch.all_workers

            @pl.when(head < heads)
            def _():
                attend(launch, refs, t, block, head)
                counters.tell(ATTENDED, block)


def _product_task(
    launch, refs, counters, worker: RowWorker, tick, count: int, adding: bool | None
) -> None:
    role = Role.of(launch, worker.program)
    t, block, there = launch.task(tick, role.kind, count)
    adds_up = (role.kind == DOWN) & launch.adds_up(role.part, block)
    is_part = (role.kind == DOWN) & ~adds_up
    mine = there & (block % launch.workers == worker.number)
    if adding is not None:
        mine = mine & (adds_up if adding else ~adds_up)

    @pl.when(mine)
    def _():
        counters.wait(launch.before_product(role.kind, t), block)
        result = multiply(launch, refs, role, worker, t, block)
        pl.when(adds_up)(lambda: counters.wait(launch.before_sum(t), block))
        finish(launch, refs, role, worker, t, block, result)
        counters.tell(jnp.where(is_part, PARTS, role.kind), block)


def _player(launch: Launch) -> Callable[[Callable[[RowWorker], None]], None]:
    """Returns what has every worker that this instance plays do something."""
    instance = jax.lax.axis_index(INSTANCE)

    def each(play: Callable[[RowWorker], None]) -> None:
        if launch.played == 1:
            return play(RowWorker(instance, 0, jax.lax.axis_index(WORKER)))
        first = instance * launch.played
        pl.loop(0, launch.played)(lambda n: play(RowWorker(first + n, n, 0)))

    return each
