"""Builds the training step: its checks, its compiled programs and its arguments.

Trainer, plan, benches and scripts all call `build_step`, so that a plan describes
exactly what is trained, and rejects a mesh with the same error as training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from recurjax.errors import UserError
from recurjax.model import Decoder, ModelConfig
from recurjax.sharding import batch_sharding, check_batch, replicated, shardings
from recurjax.surgery.adapters import adapted
from recurjax.training.config import TrainingConfig
from recurjax.training.objective import Objective, as_carried
from recurjax.training.optimizers import (
    OptimizerConfig,
    RunSize,
    Schedule,
    build_optimizer,
    learning_rate,
)
from recurjax.training.step import (
    LossFunction,
    TrainState,
    check_trained_part,
    first_state,
    train_step,
)
from recurjax.types import Array, Batch, Cache, Scalar

Metrics = dict[str, Scalar]


@runtime_checkable
class Recipe(Protocol):
    """The parts of an `Experiment` that determine a step; a bench has no data.

    Attributes:
      model, training, optimizer, schedule, objective: as an experiment's.
      evaluation_batch: rows that an evaluation runs at a time.
      has_segments: whether batches carry segments.
    """

    @property
    def model(self) -> ModelConfig: ...
    @property
    def training(self) -> TrainingConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def evaluation_batch(self) -> int: ...
    @property
    def has_segments(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A training step on one mesh. Calling it runs the compiled program.

    Attributes:
      mesh: the mesh that it runs on.
      state, batch: what it takes, as trees of ShapeDtypeStructs with their shardings.
      frozen: the same of the objective's frozen model; None without one.
      update: (state, batch, frozen) -> (state, metrics), not compiled: to trace inside
        another program.
      function: `update`, jitted; it uses the state up. Trace and compile it with the
        mesh set.
      initialise: random key -> the state before the first step.
      begin: model -> the state before the first step on these parameters, which it
        uses up.
    """

    mesh: Mesh
    state: TrainState
    batch: Batch
    frozen: Decoder | None
    update: Callable[..., tuple[TrainState, Metrics]]
    function: Any
    initialise: Callable[[Array], TrainState]
    begin: Callable[[Decoder], TrainState]

    def __call__(
        self, state: TrainState, batch: Batch, frozen: Decoder | None = None
    ) -> tuple[TrainState, Metrics]:
        """Trains on a batch; `state` is used up.

        Args:
          state: before the step.
          batch: on the mesh, or anywhere on the host.
          frozen: the model that `objective.frozen` names, on the mesh.

        Returns:
          The next state, and the metrics of `train_step` with `learning_rate` in place
          of `updates`.
        """
        with jax.set_mesh(self.mesh):
            return self.function(state, batch, frozen)


def build_step(
    experiment: Recipe,
    mesh: Mesh,
    *,
    peak: Float[Array, ""] | None = None,
    data_changes: tuple[int, ...] = (),
) -> Step:
    """Builds the training step of an experiment; nothing is compiled yet.

    Args:
      experiment: the run's configuration.
      mesh: mesh of real or planned devices.
      peak: learning rate in place of `optimizer.learning_rate`; it may be traced, so
        that one program (of `update`) serves runs at several rates.
      data_changes: see `train_step`.

    Raises:
      UserError: the model cannot train on the mesh, the mesh does not divide the rows
        of a step or of an evaluation, or nothing is left to train.
    """
    training = experiment.training
    # A traced peak lets one compiled program serve a sweep of rates.
    rate = learning_rate(
        experiment.schedule,
        peak=experiment.optimizer.learning_rate if peak is None else peak,
        steps=training.steps,
    )
    stack = experiment.model.stack
    optimizer = build_optimizer(
        experiment.optimizer,
        rate,
        clip=training.gradient_clip,
        steps=training.steps,
        size=RunSize(stack.width, stack.layers, training.tokens_per_step),
    )

    def begin(model: Decoder) -> TrainState:
        model = adapted(model, training)
        cache = _empty_cache(model, training)
        return first_state(model, optimizer, training.spikes, training.trained, cache)

    def new(key: Array) -> TrainState:
        return begin(Decoder(experiment.model, rngs=nnx.Rngs(key)))

    # Shapes suffice for the checks, so the model is not built.
    state = jax.eval_shape(new, jax.random.key(0))
    # First, because this message says most about what to change.
    refused = state.model.stack.refuses(mesh, training.length)
    if refused is not None:
        raise UserError(refused)
    if training.carry > 1 and mesh.shape["sequence"] > 1:
        raise UserError(
            "training.carry continues entire rows, and mesh.sequence "
            f"{mesh.shape['sequence']} cuts them: leave one of them at 1"
        )
    adapters_only = training.adapters is not None and training.train_only is None
    if experiment.model.weight_dtype != "float32" and not adapters_only:
        raise UserError(
            f"model.weight_dtype {experiment.model.weight_dtype} cannot be "
            "trained, because updates round to nothing in it: set float32 "
            "(start_from reads any run), or train adapters"
        )
    check_trained_part(state.model, training.trained)
    part = "training.batch / training.accumulation"
    check_batch(training.batch // training.accumulation, mesh, name=part)
    check_batch(experiment.evaluation_batch, mesh, name="evaluation.batch")

    objective: LossFunction = experiment.objective
    if training.carry > 1:
        carried = as_carried(experiment.objective)
        assert carried is not None  # `Experiment` refuses the others.
        objective = carried.carry

    def update(
        state: TrainState, batch: Batch, frozen: Decoder | None = None
    ) -> tuple[TrainState, Metrics]:
        state, metrics = train_step(
            state,
            batch,
            frozen,
            objective=objective,
            optimizer=optimizer,
            spikes=training.spikes,
            accumulation=training.accumulation,
            carry=training.carry,
            train_only=training.trained,
            data_changes=data_changes,
        )
        # What the next update will use is the rate after this many updates that
        # counted.
        now = jnp.asarray(rate(metrics.pop("updates")))
        return state, metrics | {"learning_rate": now}

    places, teacher = _shardings(state, mesh), experiment.objective.frozen
    return Step(
        mesh=mesh,
        state=_placed(state, places),
        batch=batch_shapes(
            training.batch, training.length, mesh, segments=experiment.has_segments
        ),
        frozen=None if teacher is None else model_shapes(teacher.model, mesh),
        update=update,
        function=jax.jit(
            update,
            donate_argnums=0,
            out_shardings=(places, replicated(mesh)),
            # Outputs are sharded as inputs are, so that a state enters the next step as
            # it is.
        ),
        initialise=jax.jit(
            new, out_shardings=places, compiler_options=_run_once_options(mesh)
        ),
        begin=jax.jit(begin, donate_argnums=0, out_shardings=places),
    )


def placed_shapes(tree: Any, mesh: Mesh) -> Any:
    """Returns a tree of ShapeDtypeStructs with the shardings of the rule table."""
    return _placed(tree, shardings(tree, mesh))


def _placed(tree: Any, places: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        tree,
        places,
    )


def _empty_cache(model: Decoder, training: TrainingConfig) -> Cache | None:
    """Returns the cache of `TrainState`, for rows that no step has read."""
    if training.carry == 1:
        return None
    parts = training.accumulation
    cache = model.init_cache(training.batch // parts, training.row_length)
    # An empty cache is zeros, as `CacheRows.reset` has it.
    return jax.tree.map(lambda x: jnp.zeros((parts, *x.shape), x.dtype), cache)


def _shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """Returns the shardings of a state: the rule table's, and of a cache its rows'."""
    places = shardings(state, mesh)
    if state.cache is None:
        return places
    by_row = batch_sharding(mesh).spec[0]

    def of_cache(axis: int) -> NamedSharding:
        # The accumulation's parts are in front of each array's own axes.
        spec = P() if axis < 0 else P(*[None] * (axis + 1), by_row)
        return NamedSharding(mesh, spec)

    axes = state.model.stack.row_axes(state.cache)
    return places._replace(cache=jax.tree.map(of_cache, axes))


def model_shapes(config: ModelConfig, mesh: Mesh) -> Decoder:
    """Returns a model of ShapeDtypeStructs sharded over the mesh."""
    model = jax.eval_shape(
        lambda key: Decoder(config, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    return placed_shapes(model, mesh)


def batch_shapes(rows: int, length: int, mesh: Mesh, *, segments: bool) -> Batch:
    """Returns a batch, with or without segments, as shapes sharded over the mesh."""
    ids: Any = jax.ShapeDtypeStruct(
        (rows, length), jnp.int32, sharding=batch_sharding(mesh)
    )
    return Batch(ids, ids, ids if segments else None)


def _run_once_options(mesh: Mesh) -> dict[str, Any] | None:
    """Returns how to compile the initial state, a program that runs once.

    Optimizing its random bits for a CPU takes ten times as long as running them
    unoptimized.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if on_cpu else None
