"""The programs of an experiment: functions and arguments as shapes, without weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import uncopied_weights
from recurjax.errors import UserError
from recurjax.evaluation.perplexity import batch_sums
from recurjax.exits import ExitRule
from recurjax.experiment import Experiment
from recurjax.inference.compute_dtype import multiplied_shapes
from recurjax.inference.engine import EngineConfig
from recurjax.inference.engine.slots import (
    DecodeStrategy,
    SequenceWise,
    Slots,
    decode_slots,
    empty_slots,
    read_slots,
)
from recurjax.inference.engine.strategy import choose_strategy
from recurjax.model import as_exits
from recurjax.sharding import check_batch, replicated
from recurjax.training.program import batch_shapes, build_step, model_shapes

ProgramName = Literal["train", "evaluate", "prefill", "decode", "tick"]
ROWS_A_SHARD = 8
"""The default number of texts that a device continues at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProgram:
    """One program, ready to be traced.

    Attributes:
      function: jitted function of `arguments`.
      arguments: trees of ShapeDtypeStructs with their shardings.
      parts: the arguments again, by what they are: "parameters", "optimizer",
        "caches", "data".
      tokens: tokens that one call reads or makes, over all devices.
      own_flops: FLOPs of one call by the variant's own count.
    """

    function: Any
    arguments: tuple[Any, ...]
    parts: dict[str, Any]
    tokens: int
    own_flops: float


# Of a product that XLA would fuse with what follows it, in tiles that it finds by
# trying them on the device; the tile it takes without one does not fit every fusion.
_NO_TILES = "Couldn't find output tile sizes"
_CUBLAS = (
    "without a device XLA found no tiles for a product fused with what follows it: "
    "products are planned as calls of cuBLAS, and what would be fused moves once more"
)


def compile_program(lowered: Any, *, gpu: bool) -> tuple[Any, list[str]]:
    """Compiles, and says what had to be left out of it."""
    try:
        return lowered.compile(), []
    except jax.errors.JaxRuntimeError as error:
        if not gpu or _NO_TILES not in str(error):
            raise
    options = {"xla_gpu_enable_triton_gemm": False}
    return lowered.compile(compiler_options=options), [_CUBLAS]


def build_program(
    experiment: Experiment,
    name: ProgramName,
    mesh: Mesh,
    *,
    rows: int | None = None,
    length: int | None = None,
) -> DeviceProgram:
    """Builds a program as training, evaluation and generation run it.

    Args:
      experiment: with the batch, length and accumulation to plan for.
      name: which program; "decode" makes one token of every row, "tick" takes every
        slot of an engine over depth through one pass of a recursive model's block.
      mesh: mesh of the devices.
      rows: rows of prefill and decode, or slots; None: 8 for each of the mesh's data
        shards.
      length: length of the prompts, of the cache that decode reads, or of a slot; None:
        training's.

    Raises:
      UserError: the model does not run on the mesh, or that does not divide the rows;
        for "train" what `build_step` refuses, which training refuses too; a tick of a
        model without loops, or on more than one device.
    """
    if name == "train":
        return _training(experiment, mesh)
    if name == "evaluate":
        return _evaluation(experiment, mesh)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    texts = ROWS_A_SHARD * shards if rows is None else rows
    tokens = experiment.training.length if length is None else length
    check_batch(texts, mesh, name="--rows")
    if name == "prefill":
        return _prefill(experiment, mesh, texts, tokens)
    if name == "tick":
        return _tick(experiment, mesh, texts, tokens)
    return _decode(experiment, mesh, texts, tokens)


def _training(experiment: Experiment, mesh: Mesh) -> DeviceProgram:
    step, training = build_step(experiment, mesh), experiment.training
    state = step.state
    parts = {
        "parameters": state.model,
        "optimizer": (state.optimizer, state.spikes, state.step),
        "data": step.batch,
    }
    if step.frozen is not None:
        parts["parameters"] = (state.model, step.frozen)
    if state.cache is not None:
        parts["caches"] = state.cache
    return DeviceProgram(
        function=step.function,
        arguments=(state, step.batch, step.frozen),
        parts=parts,
        tokens=training.tokens_per_step,
        own_flops=training.tokens_per_step * experiment.flops_per_token,
    )


def _evaluation(experiment: Experiment, mesh: Mesh) -> DeviceProgram:
    length, rows = experiment.training.length, experiment.evaluation_batch
    # A batch that training would refuse has no plan either.
    check_batch(rows, mesh, name="evaluation.batch")
    model = _model(experiment, mesh, length)
    batch = batch_shapes(rows, length, mesh, segments=experiment.has_segments)
    sizes = jax.ShapeDtypeStruct(
        (experiment.model.vocabulary,), jnp.int32, sharding=replicated(mesh)
    )
    sums = partial(batch_sums, objective=experiment.objective)
    return DeviceProgram(
        function=jax.jit(sums, out_shardings=replicated(mesh)),
        arguments=(model, batch, sizes),
        parts={"parameters": model, "data": (batch, sizes)},
        tokens=rows * length,
        own_flops=experiment.objective.passes
        * _forward_flops(experiment, rows, length),
    )


def _prefill(
    experiment: Experiment, mesh: Mesh, rows: int, length: int
) -> DeviceProgram:
    model = multiplied_shapes(_model(experiment, mesh, length))
    # Generation shards rows only: the tokens of a prompt stay together.
    by_row = NamedSharding(mesh, P(("data", "fsdp")))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=by_row)
    counts = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=by_row)
    params = jax.eval_shape(lambda m: _free(m, rows, length).params, model)
    params = _place(params, by_row)
    run = partial(read_slots, by="exact", top=0, length=length)
    return DeviceProgram(
        function=jax.jit(lambda model, *text: run(model, None, *text)),
        arguments=(model, ids, counts, params),
        parts={"parameters": model, "data": (ids, counts)},
        tokens=rows * length,
        own_flops=_forward_flops(experiment, rows, length),
    )


def _free(model: Any, rows: int, length: int) -> Slots:
    return empty_slots(model, strategy=SequenceWise(), rows=rows, length=length)


def _model(experiment: Experiment, mesh: Mesh, length: int) -> Any:
    """Returns the parameters as shapes, where the stack runs such rows on the mesh."""
    model = model_shapes(experiment.model, mesh)
    if (refused := model.stack.refuses(mesh, length)) is not None:
        raise UserError(refused)
    return model


def _decode(
    experiment: Experiment, mesh: Mesh, rows: int, length: int
) -> DeviceProgram:
    before = _prefill(experiment, mesh, rows, length)
    # Caches keep the sharding that prefill's compiler chooses.
    lowered = before.function.lower(*before.arguments)
    compiled, _ = compile_program(lowered, gpu=uncopied_weights.pay_off())
    slots, *_ = jax.eval_shape(before.function, *before.arguments)
    slots = _place(slots, compiled.output_shardings[0])
    everywhere = replicated(mesh)
    ended = jax.ShapeDtypeStruct((rows,), bool, sharding=everywhere)
    until_free = jax.ShapeDtypeStruct((), bool, sharding=everywhere)
    model = before.arguments[0]
    return DeviceProgram(
        function=_decoding(SequenceWise()),
        arguments=(model, None, slots, ended, until_free),
        # Compile its prefill first, because the compiler chooses the sharding of
        # caches.
        parts={"parameters": model, "caches": slots.cache},
        tokens=rows,
        # One token of each row: the count is by token.
        own_flops=_forward_flops(experiment, rows, length) / length,
    )


def _decoding(strategy: DecodeStrategy) -> Any:
    return jax.jit(
        partial(decode_slots, strategy=strategy, steps=1, top=0),
        donate_argnums=2,
        compiler_options=uncopied_weights.compiler_options(),
    )


def _tick(experiment: Experiment, mesh: Mesh, slots: int, length: int) -> DeviceProgram:
    if mesh.size > 1:
        raise UserError(
            "early exits run on one device: plan for one, such as --topology "
            "h100 --mesh data=1"
        )
    model = multiplied_shapes(_model(experiment, mesh, length))
    if as_exits(model.stack) is None:
        raise UserError(
            "--program tick is one pass of a recursive model's block, which "
            f"{type(model.config.stack).__name__} lacks: use --program decode"
        )
    # Any rule that needs no trained head: which tokens leave does not change a tick.
    rule = ExitRule(kind="confidence", threshold=0.5)
    strategy = choose_strategy(
        model, EngineConfig(slots=slots, length=length, exit=rule), None
    )
    state = jax.eval_shape(
        lambda: empty_slots(model, strategy=strategy, rows=slots, length=length)
    )
    weights = jax.eval_shape(strategy.weights, model)
    ended = jax.ShapeDtypeStruct((slots,), bool)
    until_free = jax.ShapeDtypeStruct((), bool)
    state, weights, ended, until_free = _place(
        (state, weights, ended, until_free), replicated(mesh)
    )
    return DeviceProgram(
        function=_decoding(strategy),
        arguments=(model, weights, state, ended, until_free),
        parts={"parameters": (model, weights), "caches": state},
        tokens=slots,
        own_flops=slots * _flops_of_a_tick(experiment, strategy.loops(model), length),
    )


def _flops_of_a_tick(experiment: Experiment, loops: int, length: int) -> float:
    """Counts a slot's pass of the block, and its head, which every loop has."""
    config = experiment.model
    stack = config.stack.flops_per_token(length)
    head = config.flops_per_token(length) - stack
    return (stack / loops + head) / 3  # forward alone


def _forward_flops(experiment: Experiment, rows: int, length: int) -> float:
    """Returns the FLOPs of a forward pass, a third of training's."""
    return rows * length * experiment.model.flops_per_token(length) / 3


def _place(tree: Any, where: Any) -> Any:
    # One sharding for all leaves, or a tree of them.
    if isinstance(where, NamedSharding):
        where = jax.tree.map(lambda _: where, tree)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        tree,
        where,
    )
