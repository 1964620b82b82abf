"""Compiles changes that may make a program fit: batch, remat policy, mesh."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import NamedTuple

from recurjax.experiment import Experiment
from recurjax.plan.planning import Plan
from recurjax.sharding import AXES, MeshConfig

_MOST_PARTS = 16


class PlanChange(NamedTuple):
    """A change and what it comes to.

    Attributes:
      option: as `recurjax plan` and `recurjax train` take it.
      plan: plan of the experiment with the change.
    """

    option: str
    plan: Plan


def find_changes(
    experiment: Experiment, plan: Plan, again: Callable[[Experiment], Plan]
) -> list[PlanChange]:
    """Plans the three changes most likely to help.

    Of the batch, the fewest parts that fit, or the most that were tried.

    Args:
      experiment: the experiment that does not fit.
      plan: plan of the experiment.
      again: plans an experiment for the same topology and program.
    """
    changes = []
    for options in (
        _smaller_batches(experiment, plan),
        _more_recomputation(experiment),
        _other_meshes(experiment, plan),
    ):
        # Options are tried until one fits; without one the last try is shown, which
        # comes nearest.
        tried = None
        for option, changed in options:
            tried = PlanChange(option, again(changed))
            if tried.plan.fits:
                break
        if tried is not None:
            changes.append(tried)
    return changes


def _smaller_batches(
    experiment: Experiment, plan: Plan
) -> Iterator[tuple[str, Experiment]]:
    training = experiment.training
    shards = plan.mesh["data"] * plan.mesh["fsdp"]
    # Accumulation does not change the optimization: the same rows per step in parts.
    parts = 2 * training.accumulation
    while parts <= _MOST_PARTS * training.accumulation:
        # From here on the parts would be uneven, or smaller than the devices that share
        # them.
        if training.batch % parts or (training.batch // parts) % shards:
            return
        changed = replace(training, accumulation=parts)
        yield (
            f"--training.accumulation {parts}",
            replace(experiment, training=changed),
        )
        parts *= 2


def _more_recomputation(experiment: Experiment) -> Iterator[tuple[str, Experiment]]:
    model, stack = experiment.model, experiment.model.stack
    # Not every variant has the policy: look for the config's field.
    has_remat = "remat" in {field.name for field in fields(stack)}
    if has_remat and stack.remat != "block":  # pyright: ignore[reportAttributeAccessIssue]
        changed = replace(model, stack=replace(stack, remat="block"))  # pyright: ignore[reportCallIssue]
        yield "--model.stack.remat block", replace(experiment, model=changed)
        return
    # Logits are computed again in pieces.
    chunks = max(8, 4 * experiment.objective.vocabulary_chunks)
    objective = replace(experiment.objective, vocabulary_chunks=chunks)
    yield (
        f"--objective.vocabulary-chunks {chunks}",
        replace(experiment, objective=objective),
    )


def _other_meshes(
    experiment: Experiment, plan: Plan
) -> Iterator[tuple[str, Experiment]]:
    """Yields meshes that cut parameters further: first over rows, which sends least."""
    mesh, training = plan.mesh, experiment.training
    rows, tensor = mesh["data"] * mesh["fsdp"], mesh["tensor"]
    # Parameters over all devices; over all that had rows; the tensor axis doubled.
    cuts = [(rows * tensor, 1), (rows, tensor)]
    if rows % 2 == 0:
        cuts.append((rows // 2, 2 * tensor))
    for fsdp, tensor in dict.fromkeys(cuts):
        rows_of_a_part = training.batch // training.accumulation
        # Evaluation runs on the same mesh, so its batch has to divide as well.
        divides = rows_of_a_part % fsdp == experiment.evaluation_batch % fsdp == 0
        now = (mesh["data"], mesh["fsdp"], mesh["tensor"]) == (1, fsdp, tensor)
        if divides and not now:
            changed = replace(experiment.mesh, data=1, fsdp=fsdp, tensor=tensor)
            yield _option(changed), replace(experiment, mesh=changed)


def _option(mesh: MeshConfig) -> str:
    """Writes a mesh as fields; `--mesh fsdp=8` is an option of `plan` alone."""
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    # Mention the unchanged axes that cut something.
    options = {
        axis: size
        for axis, size in sizes.items()
        if axis in ("data", "fsdp", "tensor") or size != 1
    }
    return " ".join(f"--mesh.{axis} {size}" for axis, size in options.items())
