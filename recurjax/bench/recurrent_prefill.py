"""The op of the Recurrent Transformer by backend, and its block sizes tuned."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.recurrent_prefill import (
    BlockSizes,
    LayerSpec,
    LayerWeights,
    empty_cache,
    recurrent_prefill,
)
from pallas_kernels.recurrent_prefill.api import OP
from pallas_kernels.recurrent_prefill.block_sizes import shape_class
from recurjax.bench.recurrent_transformer import LARGE, SMALL, layers
from recurjax.bench.timing import Row, in_turns, repeat, row
from recurjax.bench.tuning import Candidate, Sizes, Tuned, tune_one_by_one
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.model import make_stack
from recurjax.sharding import make_mesh
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.recurrent_transformer.block import spec_of, weights_of

Dtype = Literal["float32", "bfloat16"]

_PREFIX = "recurrent_prefill"
PASSES = ("forward", "forward_backward")
CANDIDATES: Mapping[str, Mapping[str, Sequence[int]]] = {
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
"""What is tried of each size, in the order in which one is settled after the other: a
tile decides how often everything else runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A training call of the op: arrays, and how it is made."""

    spec: LayerSpec
    schedule: str | None
    x: jax.Array
    weights: LayerWeights

    @property
    def tokens(self) -> int:
        """B T."""
        return self.x.shape[0] * self.x.shape[1]

    def run(self, x: jax.Array, weights: LayerWeights, **options: Any) -> jax.Array:
        """Returns z."""
        L, (B, _, D) = weights.w_q.shape[0], x.shape
        cache = empty_cache(L, B, 0, D, self.spec)
        options = {"spec": self.spec, "schedule": self.schedule, **options}
        return recurrent_prefill(x, weights, cache, **options)[0]

    def program(self, what: str, **options: Any) -> Callable[[], Any]:
        """Compiles a pass; calling it runs it."""

        def squares(x: jax.Array, weights: LayerWeights) -> jax.Array:
            # A plain sum's gradient is the same everywhere: a compiler may use that.
            z = self.run(x, weights, **options)
            return jnp.sum(z.astype(jnp.float32) ** 2)

        function = (
            partial(self.run, **options)
            if what == "forward"
            else jax.grad(squares, argnums=(0, 1))
        )
        compiled = jax.jit(function).lower(self.x, self.weights).compile()
        return partial(compiled, self.x, self.weights)

    def backends(self) -> list[str]:
        """Returns those that serve it on this device, as a call prefers them."""
        serving = []
        for name in OP.backends:
            run = partial(self.run, implementation=name)
            try:
                jax.eval_shape(run, self.x, self.weights)
            except NotImplementedError:
                continue
            serving.append(name)
        return serving


def call_of(config: RecurrentTransformerConfig, B: int, T: int, dtype: str) -> Call:
    """Makes a call with random weights; in a wavefront of all layers, else of one."""
    if config.schedule != "wavefront":
        config = replace(config, layers=1)
    stack: Any = jax.jit(lambda: make_stack(config, rngs=nnx.Rngs(0)))()
    # The residual stream is at least float32, as the stack gives it to the op.
    wide = jnp.promote_types(dtype, jnp.float32)
    return Call(
        spec=spec_of(config, dtype),
        schedule=config.schedule,
        x=jax.random.normal(jax.random.key(1), (B, T, config.width), wide),
        weights=weights_of(stack.blocks),
    )


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[Row]:
    """Measures both passes of every backend that serves the layer here."""
    for shape in LARGE if large else SMALL:
        call = call_of(_layer(shape), shape["B"], shape["T"], dtype)
        for backend in call.backends():
            for what in PASSES:
                run = call.program(what, implementation=backend)
                name = f"{_PREFIX}/{backend}/{what}"
                times = repeat(run, repeats=repeats)
                yield row(name, shape, dtype, times, tokens=call.tokens)


def summary(rows: list[Row]) -> str:
    """Names the fastest backend of every shape where there are several."""
    lines = []
    for shape in {tuple(r.shape.items()): r.shape for r in rows}.values():
        both = {
            r.name.split("/")[1]: r.min_ms
            for r in rows
            if r.shape == shape and r.name.endswith("/forward_backward")
        }
        if len(both) > 1:
            ordered = sorted(both, key=lambda name: both[name])
            told = ", ".join(f"{name} {both[name]:,.1f} ms" for name in ordered)
            lines.append(f"B {shape['B']}, T {shape['T']}, both passes: {told}")
    return "\n".join(lines)


def tune(
    *, large: bool, dtype: Dtype, repeats: int, experiment: Experiment | None = None
) -> Iterator[Tuned]:
    """Tries block sizes of the backend that serves each call, and yields the best.

    Both passes together are timed, a training step's share; the sizes are settled one
    after the other, the candidates of each in turns with the best so far.

    Args:
      large, dtype: of the bench's layers.
      experiment: tunes what a device of this run has instead, in its own dtype.

    Raises:
      UserError: the experiment trains no Recurrent Transformer, or position by
        position.
    """
    if experiment is None:
        shapes = LARGE if large else SMALL
        calls = (call_of(_layer(s), s["B"], s["T"], dtype) for s in shapes)
    else:
        calls = iter([_call_of_run(experiment)])
    for call in calls:
        backend = call.backends()[0]
        B, _, D = call.x.shape
        cache = empty_cache(1, B, 0, D, call.spec)
        options = {"spec": call.spec, "schedule": call.schedule}
        yield tune_one_by_one(
            op=_PREFIX,
            backend=backend,
            shape=shape_class(call.x, call.weights, cache, **options),
            candidates=_candidates(call, backend),
            make=partial(_candidate, call, backend),
            time=partial(in_turns, repeats=repeats, warmup=1),
        )


def _layer(shape: Mapping[str, int]) -> RecurrentTransformerConfig:
    """Returns the layer of the variant's bench, in the default order of work."""
    return cast(RecurrentTransformerConfig, layers(dict(shape))["prefix"])


def _call_of_run(experiment: Experiment) -> Call:
    """Makes the call that one device has in a step of the run."""
    stack, training = experiment.model.stack, experiment.training
    # An order of work over tiles is what the stacks of this op have, and no others.
    if not hasattr(stack, "schedule"):
        raise UserError(
            f"{experiment.name} trains a {type(stack).__name__}: only a Recurrent "
            "Transformer has the op recurrent_prefill"
        )
    stack = cast(RecurrentTransformerConfig, stack)
    if stack.schedule == "naive":
        raise UserError(f"{experiment.name}: the naive schedule has no sizes to tune")
    mesh = make_mesh(experiment.mesh).shape
    if mesh["stage"] > 1:
        raise UserError("tunes layers that lie on one device: set --mesh.stage 1")
    rows = training.batch // training.accumulation
    parts = mesh["data"] * mesh["fsdp"]
    # A batch that the devices do not divide is computed whole on each.
    rows = rows if rows % parts else rows // parts
    return call_of(stack, rows, training.length, experiment.model.dtype)


def _candidates(call: Call, backend: str) -> dict[str, Sequence[int]]:
    """Returns what is tried of each size; a tile has whole blocks."""
    tried = {name: list(sizes) for name, sizes in CANDIDATES[backend].items()}
    tried["tile"] = [tile for tile in tried["tile"] if tile % call.spec.block == 0]
    return {name: sizes for name, sizes in tried.items() if sizes}


def _candidate(call: Call, backend: str, sizes: Sizes) -> Candidate:
    """Compiles both passes with these sizes; {}: with the heuristic's.

    Raises:
      NotImplementedError: the backend cannot have them here.
    """
    blocks = {name: size for name, size in sizes.items() if name != "tile"}
    return call.program(
        "forward_backward",
        implementation=backend,
        tile=sizes.get("tile"),
        # Given, even without a size: what was measured before must not be read.
        blocks=BlockSizes(**blocks),
    )
