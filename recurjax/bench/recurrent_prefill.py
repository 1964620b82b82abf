"""The op of the Recurrent Transformer by backend, and its block sizes tuned."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import target
from pallas_kernels.recurrent_prefill import (
    BlockSizes,
    LayerWeights,
    Rows,
    empty_cache,
    recurrent_prefill,
)
from pallas_kernels.recurrent_prefill.api import OP
from pallas_kernels.recurrent_prefill.call import (
    RecurrentPrefillCall,
    RecurrentPrefillOptions,
)
from pallas_kernels.recurrent_prefill.triton.backend import choose_schedule
from recurjax.bench import op_by_backend
from recurjax.bench.op_by_backend import Call, Candidates, Dtype, rows_of_step
from recurjax.bench.recurrent_transformer import LARGE, SMALL, layers
from recurjax.bench.timing import BenchRow
from recurjax.bench.tuning import Sizes, Tuned
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.sharding import make_mesh
from recurjax.variants.recurrent_transformer import (
    RecurrentTransformerConfig,
    RecurrentTransformerStack,
)
from recurjax.variants.recurrent_transformer.block import spec_of, weights_of

CANDIDATES: Candidates = {
    "triton": {
        "tile": (16, 32, 64),
        "sub_tile": (16, 32, 64),
        "rows": (16, 32, 64, 128),
        "columns": (32, 64, 128),
        "depth": (16, 32, 64, 128),
        "splits": (1, 2, 4, 8, 16),
        "stages": (2, 3, 4, 6),
        "attend_rows": (1, 2, 4, 8),
        "keys": (16, 32, 64, 128),
    },
    "mosaic_tpu": {"tile": (16, 32), "rows": (8, 16, 32, 64, 128)},
    "xla": {"tile": (16, 32, 64, 128), "keys": (64, 128, 256, 512)},
}
"""A tile decides how often everything else runs."""

summary = op_by_backend.summary


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Measures both passes of every backend that serves the layer here."""
    yield from op_by_backend.rows(_calls(large, dtype), dtype=dtype, repeats=repeats)


def tune(
    *, large: bool, dtype: Dtype, repeats: int, experiment: Experiment | None = None
) -> Iterator[Tuned]:
    """Tries block sizes of the backend that serves each call, and yields the best.

    Args:
      large, dtype: of the bench's layers.
      experiment: tunes what a device of this run has instead, in its own dtype.

    Raises:
      UserError: the experiment trains no Recurrent Transformer, or position by
        position.
    """
    if experiment is None:
        calls, block = _calls(large, dtype), 1
    else:
        calls, block = iter([_call_of_run(experiment)]), _stack_of(experiment).block
    tried = {name: _whole_blocks(sizes, block) for name, sizes in CANDIDATES.items()}
    yield from op_by_backend.tune(calls, tried, repeats=repeats)


def call_of(config: RecurrentTransformerConfig, B: int, T: int, dtype: str) -> Call:
    """Makes a call with random weights; in a wavefront of all layers, else of one."""
    if config.schedule != "wavefront":
        config = replace(config, layers=1)
    stack = jax.jit(lambda: RecurrentTransformerStack(config, rngs=nnx.Rngs(0)))()
    # The residual stream is at least float32, as the stack gives it to the op.
    wide = jnp.promote_types(dtype, jnp.float32)
    x = jax.random.normal(jax.random.key(1), (B, T, config.width), wide)
    weights = weights_of(stack.blocks)
    spec, schedule = spec_of(config, dtype), config.schedule
    cache = empty_cache(weights.w_q.shape[0], B, 0, config.width, spec)

    options = RecurrentPrefillOptions(spec=spec, schedule=schedule)
    call = RecurrentPrefillCall(x, weights, cache, Rows(), options)

    def run(x: jax.Array, weights: LayerWeights, **options: Any) -> jax.Array:
        options = {"spec": spec, "schedule": schedule, **options}
        return recurrent_prefill(x, weights, cache, **options)[0]

    return Call(
        op=OP,
        function=run,
        arrays=(x, weights),
        shape={"B": B, "T": T, "D": config.width, "H": config.heads},
        shape_class=call.shape_class,
        sized=_sized,
    )


def _sized(sizes: Sizes) -> dict[str, Any]:
    blocks = {name: size for name, size in sizes.items() if name != "tile"}
    return {"tile": sizes.get("tile"), "blocks": BlockSizes(**blocks)}


def _calls(large: bool, dtype: Dtype) -> Iterator[Call]:
    for shape in LARGE if large else SMALL:
        yield call_of(_layer(shape), shape["B"], shape["T"], dtype)


def _layer(shape: Mapping[str, int]) -> RecurrentTransformerConfig:
    """Returns the layer of the variant's bench, in the default order of work."""
    return cast(RecurrentTransformerConfig, layers(dict(shape))["prefix"])


def _stack_of(experiment: Experiment) -> RecurrentTransformerConfig:
    stack = experiment.model.stack
    if not isinstance(stack, RecurrentTransformerConfig):
        raise UserError(
            f"{experiment.name} trains a {type(stack).__name__}: only a Recurrent "
            "Transformer has the op recurrent_prefill"
        )
    if stack.schedule == "naive":
        raise UserError(f"{experiment.name}: the naive schedule has no sizes to tune")
    return stack


def _call_of_run(experiment: Experiment) -> Call:
    """Makes the call that one device has in a step of the run."""
    stack = _stack_of(experiment)
    mesh = make_mesh(experiment.mesh).shape
    if mesh["stage"] > 1:
        raise UserError("tunes layers that lie on one device: set --mesh.stage 1")
    rows, parts = rows_of_step(experiment), mesh["data"] * mesh["fsdp"]
    # A batch that the devices do not divide is computed whole on each.
    rows = rows if rows % parts else rows // parts
    sizes = (rows, experiment.training.length, experiment.model.dtype)
    return call_of(_ordered(stack, *sizes), *sizes)


def _ordered(
    stack: RecurrentTransformerConfig, B: int, T: int, dtype: str
) -> RecurrentTransformerConfig:
    """Gives the stack the order of work that its training has on this device."""
    if target.refusal_of_triton() is not None:
        return stack

    def arrays():
        layers = RecurrentTransformerStack(stack, rngs=nnx.Rngs(0))
        cache = layers.init_cache(B, 0, dtype)
        return jnp.zeros((B, T, stack.width)), weights_of(layers.blocks), cache

    schedule = choose_schedule(stack.schedule, *jax.eval_shape(arrays))
    return replace(stack, schedule=schedule)  # pyright: ignore[reportArgumentType]


def _whole_blocks(
    tried: Mapping[str, Sequence[int]], block: int
) -> dict[str, Sequence[int]]:
    """Returns what is tried of each size; a tile has whole blocks."""
    tiles = [tile for tile in tried.get("tile", ()) if tile % block == 0]
    fitting = {**tried, "tile": tiles}
    return {name: fitting[name] for name in tried if fitting[name]}
