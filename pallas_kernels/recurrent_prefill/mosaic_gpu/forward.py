"""A tile's loop over positions as one persistent kernel, its weights on chip."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.equations import (
    Prepared,
    activate_in_kernel,
    norm_and_rotate,
)
from pallas_kernels.recurrent_prefill.mosaic_gpu.attention import attend
from pallas_kernels.recurrent_prefill.mosaic_gpu.blocks import put, read
from pallas_kernels.recurrent_prefill.mosaic_gpu.launch import Launch
from pallas_kernels.recurrent_prefill.mosaic_gpu.products import (
    Product,
    Products,
    finish,
    hold_weights,
    multiply,
)
from pallas_kernels.recurrent_prefill.mosaic_gpu.refs import (
    Refs,
    Resident,
    TileInputs,
    TileOutputs,
    TileScratch,
)
from pallas_kernels.recurrent_prefill.tiles.layout import queries_and_pairs
from pallas_kernels.recurrent_prefill.triton.attention import TileState
from pallas_kernels.recurrent_prefill.triton.forward import Tile
from pallas_kernels.recurrent_prefill.triton.launch import Launch as PrefixLaunch
from pallas_kernels.recurrent_prefill.triton.prefix import attend_prefix

INSTANCE = "instance"
"""The grid's axis."""


def run_tile(
    launch: Launch,
    resident: Resident,
    prefix: PrefixLaunch,
    x: Float[Array, "1 b B D"],
    w: Prepared,
    keys: Float[Array, "1 B S KE"],
    values: Float[Array, "1 B S KE"],
    start: Int[Array, " B"],
    done: Int[Array, "1"],
    count: int,
) -> Tile:
    """Runs `count` of a tile's positions; `done` came before.

    Args:
      prefix: how Triton's kernel for the prefix is launched.
      keys, values: of the positions before; the other arguments are `run_layers`'.
    """
    spec = launch.spec
    q, own_k, own_v = queries_and_pairs(x, w, spec)
    before = (start + done[:, None]).astype(jnp.int32)
    running = attend_prefix(prefix, q, own_k, own_v, keys, values, before)
    out = _launch(
        launch,
        lambda *refs: _tile_kernel(launch, Refs(*refs), count),
        TileInputs(q[0], x[0], *(part[0] for part in running)),
        resident,
        out_shape=TileOutputs.shapes(launch, x[0], resident.w_in.shape[1]),
        scratch=TileScratch.shapes(launch),
    )
    # The step that would have finished the last position's key never came.
    last = norm_and_rotate(out.raw_k[None], w.k_norm, None, spec)
    last = last.reshape(out.raw_k.shape).astype(out.keys.dtype)
    new_keys = jax.lax.dynamic_update_index_in_dim(out.keys, last, count - 1, 0)
    state = TileState(out.attended, out.lse, new_keys, out.values)
    return jax.tree.map(lambda part: part[None], Tile(out.z, state))


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

    # Layouts of most values follow from those of what is read, which the compiler
    # infers with the semantics of a whole warpgroup.
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    out = plgpu.kernel(
        body,
        out_type=list(out_shape),
        scratch_types=list(scratch),
        grid=(launch.instances,),
        grid_names=(INSTANCE,),
        kernel_name="recurrent_tile",
        interpret=launch.interpret,
        compiler_params=params,
    )(*(array for group in arguments for array in group))
    return type(out_shape)(*out)


class Meeting(NamedTuple):
    """Where programs wait for one another: counters in memory that only grow."""

    launch: Launch
    everyone: Any  # one counter
    groups: Any  # [4 P], one for each product's columns

    @classmethod
    def open(cls, launch: Launch) -> "Meeting":
        if launch.instances == 1:
            return cls(launch, None, None)
        counters = plgpu.SemaphoreType.REGULAR((4 * launch.programs,))
        return cls(
            launch, pl.get_global(plgpu.SemaphoreType.REGULAR), pl.get_global(counters)
        )

    def of_all(self, number) -> None:
        """Waits for all programs, for the time with this number, from 1."""
        if self.everyone is not None:
            _meet(self.everyone, number * self.launch.instances)

    def of_group(self, product: Product, number) -> None:
        """Waits for the programs of one's own columns of a product."""
        if self.groups is not None and product.share.splits > 1:
            group, _ = product.group(jax.lax.axis_index(INSTANCE))
            counter = self.groups.at[product.order * self.launch.programs + group]
            _meet(counter, number * product.share.splits)


def _meet(counter: Any, reached) -> None:
    # A signal releases what its program wrote, a wait acquires what others did.
    plgpu.semaphore_signal(counter, memory_scope="gpu")
    plgpu.semaphore_wait(counter, reached, decrement=False, memory_scope="gpu")


# A program owns a part of each of the layer's four weights, for all rows: 64 columns
# and 1 / splits of the contracted axis. It copies them on chip once a tile and keeps
# them. At each position programs attend for some blocks of 64 rows and heads, then take
# the four products in turn: each multiplies its part, meets those that own the same
# columns, finishes its share of them and meets all. What crosses memory, the second
# level of cache in practice: rows to a program's part, its part of a result in float32
# and back, a tile's earlier pairs; x, q, softmax state, z, attended and pairs once.
def _tile_kernel(launch: Launch, refs: Refs, count: int) -> None:
    spec, outputs = launch.spec, refs.outputs
    products, meeting = Products.of(launch, refs), Meeting.open(launch)
    each = _player(launch)
    each(lambda program, n: hold_weights(products, refs.scratch, program, n))

    def take(
        t,
        product: Product,
        rows_of: Callable[..., Any],
        use: Callable[..., None],
        *,
        normed: bool = False,
    ) -> None:
        """Takes one product; `use` gets the program and what `finish` hands on."""
        each(
            lambda program, n: multiply(
                launch, refs, product, rows_of, program, n, squares=normed
            )
        )
        meeting.of_group(product, t + 1)
        each(
            lambda program, _: finish(
                launch, refs, product, program, partial(use, program), squares=normed
            )
        )
        meeting.of_all(5 * t + 2 + product.order)

    @pl.loop(0, count)
    def _(t):
        each(lambda program, _: attend(launch, refs, t, program))
        meeting.of_all(5 * t + 1)

        def use_attended(program, rows, columns, result):
            x = read(launch, refs.inputs.x, t, rows, columns)
            y = x + spec.residual_scale * result
            outputs.y[rows, columns] = y
            put(y, products.out.finished, outputs.y_rows.at[rows, columns])

        def use_hidden(program, rows, columns, result):
            hidden = activate_in_kernel(result, spec.activation)
            put(hidden, products.up.finished, outputs.hidden.at[rows, columns])

        def use_branch(program, rows, columns, result):
            y = read(launch, outputs.y, rows, columns)
            z = y + spec.residual_scale * result
            outputs.z[t, rows, columns] = z
            put(z, products.down.finished, outputs.z_rows.at[rows, columns])

        def use_pair(program, rows, columns, result):
            # Keys come first: a program finishes either keys or values.
            count, width = products.pair.share.columns, outputs.keys.shape[2]
            first = program * count

            @pl.when(first < width)
            def _():
                outputs.raw_k[rows, columns] = result
                outputs.k_squares[program, rows] = jnp.sum(result * result, axis=1)

            @pl.when(first >= width)
            def _():
                target = outputs.values.at[t, rows, pl.ds(first - width, count)]
                put(result, products.pair.finished, target)

        normed, source = spec.norm == "rms", spec.normed_persistent
        block_of = lambda ref: lambda rows, columns: ref.at[rows, columns]  # noqa: E731
        attended = lambda rows, columns: outputs.attended.at[t, rows, columns]  # noqa: E731
        take(t, products.out, attended, use_attended)
        take(t, products.up, block_of(outputs.y_rows), use_hidden, normed=normed)
        take(t, products.down, block_of(outputs.hidden), use_branch)
        rows_of = block_of(outputs.z_rows)
        take(t, products.pair, rows_of, use_pair, normed=normed and source)


def _player(launch: Launch) -> Callable[[Callable[[Any, Any], None]], None]:
    """Returns what has every program that this instance plays do something."""
    instance = jax.lax.axis_index(INSTANCE)

    def each(play: Callable[[Any, Any], None]) -> None:
        if launch.played == 1:
            return play(instance, 0)
        pl.loop(0, launch.played)(lambda n: play(instance * launch.played + n, n))

    return each
