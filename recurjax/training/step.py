"""One training step: gradients, accumulation, the spike rule, the update."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Int

from recurjax.errors import UserError
from recurjax.model import Decoder
from recurjax.parameters import parameter_name
from recurjax.training.spikes import SpikeConfig, SpikeState, judge, new_spike_state
from recurjax.types import IGNORED, Array, Batch, Cache, Scalar

LossFunction = Callable[..., tuple[Scalar, Any]]
"""(model, batch) -> (loss, metrics); with a third argument, what is frozen.

With `carry` > 1 it is (model, batch, cache) -> (loss, (metrics, cache)).

A loss is a mean over counted targets. One that is the mean of several such means has
`counts(batch)`, the targets of each, and takes `shares`: see `_gradient`."""


class TrainState(NamedTuple):
    """Everything that training changes; a pytree that checkpoints save in full.

    Attributes:
      step: steps done.
      model: the parameters.
      optimizer: its moments and counts.
      spikes: state of the spike rule.
      cache: the caches of the rows that steps carry, of each part of the accumulation,
        [A, ...]; None: every step reads rows of their own.
    """

    step: Int[Array, ""]
    model: Decoder
    optimizer: Any
    spikes: SpikeState
    cache: Cache | None = None


def first_state(
    model: Decoder,
    optimizer: optax.GradientTransformation,
    spikes: SpikeConfig,
    train_only: str | None = None,
    cache: Cache | None = None,
) -> TrainState:
    """Returns the state before the first step on a model's parameters."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        model=model,
        # Moments only of what is trained: a frozen part has no state.
        optimizer=optimizer.init(trained_part(model, train_only)),
        spikes=new_spike_state(spikes),
        cache=cache,
    )


def train_step(
    state: TrainState,
    batch: Batch,
    frozen: Any = None,
    *,
    objective: LossFunction,
    optimizer: optax.GradientTransformation,
    spikes: SpikeConfig,
    accumulation: int = 1,
    carry: int = 1,
    train_only: str | None = None,
    data_changes: tuple[int, ...] = (),
) -> tuple[TrainState, dict[str, Scalar]]:
    """Makes one update, or skips it by the rule of `SpikeConfig`.

    Args:
      state: before the step.
      batch: B rows, B a multiple of `accumulation`.
      frozen: arrays that the objective reads and no step changes, such as a teacher's
        parameters; None for an objective of (model, batch) alone.
      objective: loss and metrics of a batch.
      optimizer: from `build_optimizer`.
      spikes: when to skip.
      accumulation: parts of the batch that go through the model one after another;
        the gradient is that of the mean over the full batch's counted targets.
      carry: steps over which a row's cache is carried. The gradient takes the cache as
        a constant, and a skipped step leaves it as it was.
      train_only: a pattern of the names of what is trained; None: everything.
      data_changes: steps at which the data change (a mixture's weights); later losses
        are not compared with earlier ones.

    Returns:
      The next state, and metrics: the objective's own, `gradient_norm` (of what is
      trained, before clipping), `update_norm` (of what is added to them), `skipped`
      (in a row) and `updates` (made before this).
    """
    counts = getattr(objective, "counts", None)
    if frozen is not None:
        objective = _with_frozen(objective, frozen)
    if train_only is not None:
        objective = _of_trained_part(objective, state.model)
    trained = trained_part(state.model, train_only)
    caches = None
    if carry > 1:
        caches = _without_ended_rows(state, len(batch.ids), accumulation, carry)
    gradient, metrics, carried = _gradient(
        trained, batch, caches, objective, accumulation, counts
    )
    # Before clipping: the norm that metrics show and the spike rule checks.
    norm = optax.tree.norm(gradient)
    updates, moments = optimizer.update(gradient, state.optimizer, trained)
    # Check both: a finite gradient can still give an update that is not finite, such as
    # after an overflow of the second moment.
    update_norm = optax.tree.norm(updates)
    finite = jnp.isfinite(norm) & jnp.isfinite(update_norm)
    changed = False
    for step in data_changes:
        changed |= state.step == step
    good, seen = judge(state.spikes, metrics["loss"], finite, spikes, new_data=changed)
    model = whole_model(optax.apply_updates(trained, updates), state.model)
    # Select between the old and the new state on the device: a skipped step costs the
    # same as any other, and no value has to reach the host.
    keep = partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
    if spikes.enabled:
        model = keep(model, state.model)
        moments = keep(moments, state.optimizer)
        carried = keep(carried, caches)
    metrics |= {
        "gradient_norm": norm,
        "update_norm": update_norm,
        "skipped": seen.skipped,
        "updates": state.spikes.accepted,
    }
    return TrainState(state.step + 1, model, moments, seen, carried), metrics  # pyright: ignore[reportArgumentType]


def _without_ended_rows(
    state: TrainState, rows: int, accumulation: int, carry: int
) -> Cache:
    """Empties the cache of the rows that begin another text at this step."""
    new = (state.step + jnp.arange(rows)) % carry == 0  # as in `CarriedBatches`
    # Part a of the accumulation has the rows a, a + A, ...: see `_gradient`.
    parts = new.reshape(-1, accumulation).T
    return jax.vmap(state.model.stack.reset)(state.cache, parts)


def _with_frozen(objective: LossFunction, frozen: Any) -> LossFunction:
    # Closed over, so that the gradient is that of the model alone.
    return lambda model, batch, **options: objective(model, batch, frozen, **options)


def _of_trained_part(objective: LossFunction, model: Decoder) -> LossFunction:
    # The rest is closed over as well, so that no gradient is made for it.
    return lambda trained, *inputs, **options: objective(
        whole_model(trained, model), *inputs, **options
    )


def _gradient(
    model: Any,
    batch: Batch,
    caches: Cache | None,
    objective: LossFunction,
    accumulation: int,
    counts: Callable[[Batch], Array] | None = None,
) -> tuple[Any, dict[str, Scalar], Cache | None]:
    """Returns the gradient of the full batch, the objective's metrics, and the caches.

    Args:
      caches: a cache for each part, stacked; None: the objective takes none.
      counts: counts of an objective that is the mean of several means: the targets of
        each. It is then called with `shares`, the fractions of the full batch's targets
        that a part has, by which it multiplies the part's means. None: it is one mean.
    """

    def evaluate(model: Any, batch: Batch, cache: Cache | None, **options: Any) -> Any:
        if cache is None:
            loss, metrics = objective(model, batch, **options)
            return loss, (metrics, None)
        return objective(model, batch, cache)

    differentiate = jax.value_and_grad(evaluate, has_aux=True)
    if accumulation == 1:
        cache = jax.tree.map(lambda x: x[0], caches)
        (_, (metrics, cache)), gradient = differentiate(model, batch, cache)
        return gradient, metrics, jax.tree.map(lambda x: x[None], cache)
    # Part a takes the rows a, a + A, ...: so each device keeps its share of every part.
    parts = jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(-1, accumulation, *x.shape[1:]), 0, 1), batch
    )
    count = _counted if counts is None else counts
    targets = jnp.maximum(count(batch), 1)  # A batch without targets has gradient 0.

    # Weight a part's mean by its share of the targets: the sum is the mean over the
    # full batch, not the mean of the parts' means.
    def shared(part: Batch, cache: Cache | None) -> tuple[Any, Cache | None]:
        shares = count(part) / targets
        options = {} if counts is None else {"shares": shares}
        (_, (metrics, cache)), gradient = differentiate(model, part, cache, **options)
        if counts is not None:
            return (gradient, metrics), cache
        return jax.tree.map(lambda x: x * shares, (gradient, metrics)), cache

    def add(total: Any, part: tuple[Batch, Cache | None]) -> tuple[Any, Cache | None]:
        one, cache = shared(*part)
        return jax.tree.map(jnp.add, total, one), cache

    inputs = (parts, caches)
    shapes, _ = jax.eval_shape(shared, *jax.tree.map(lambda x: x[0], inputs))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (gradient, metrics), caches = jax.lax.scan(add, zeros, inputs)
    return gradient, metrics, caches


def _counted(batch: Batch) -> Scalar:
    return jnp.sum(batch.targets != IGNORED).astype(jnp.float32)


def trained_part(model: Decoder, pattern: str | None) -> Any:
    """Returns a model without the parameters that are not trained.

    In their places are nodes without leaves, as in optax's masks: gradients, moments
    and decay of such a tree are those of the rest alone, under the same names.

    Args:
      pattern: see `training.train_only`; None: the model as it is.
    """
    if pattern is None:
        return model
    matcher = re.compile(pattern)

    def keep(path: tuple[Any, ...], leaf: Any) -> Any:
        # A place without leaves: tree functions pass it by.
        return leaf if matcher.search(parameter_name(path)) else optax.MaskedNode()

    return jax.tree_util.tree_map_with_path(keep, model)


def whole_model(trained: Any, model: Decoder) -> Decoder:
    """Returns a model with the trained part in the place of its own."""
    return jax.tree.map(
        lambda new, old: old if _left_out(new) else new,
        trained,
        model,
        is_leaf=_left_out,
    )


def check_trained_part(model: Decoder, pattern: str | None) -> None:
    """Raises UserError for a pattern that no parameter's name matches."""
    if pattern is None or jax.tree.leaves(trained_part(model, pattern)):
        return
    paths = jax.tree_util.tree_leaves_with_path(model)
    names = [parameter_name(path) for path, _ in paths]
    raise UserError(
        f"training.train_only {pattern!r} matches no parameter: use a "
        f"pattern for names such as {names[0]} and {names[-1]}"
    )


def _left_out(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
