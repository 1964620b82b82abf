"""Collectives of a training step: no full parameter over `tensor`, no activation."""

from dataclasses import replace

import jax
import pytest

from recurjax import sharding
from recurjax.experiment import Experiment
from recurjax.layers.mlp import MlpConfig
from recurjax.parameters import find_rule
from recurjax.plan.hlo import parse
from recurjax.plan.programs import build_program
from recurjax.plan.traffic import Collective, read_traffic
from recurjax.sharding import AXES, MeshConfig, P, make_mesh
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
    MemoryConfig,
)
from recurjax.variants.latent_recurrent_transformer.objectives import Interleaved
from recurjax.variants.rat import RatConfig, RatMixerConfig
from tests.compiling import QUICK_COMPILE
from tests.training import tiny_experiment

WIDTH, FEED_FORWARD = 16, 512
SMALLEST = WIDTH * FEED_FORWARD * 4
"""Bytes of one layer's feed-forward matrix; activations are far smaller."""


def wide_transformer() -> Experiment:
    """Returns a run whose parameters are far larger than its activations."""
    run = tiny_experiment.config()
    mlp = MlpConfig(kind="gelu", width=FEED_FORWARD)
    stack = replace(run.model.stack, layers=1, mlp=mlp)
    training = replace(run.training, batch=4, length=4)
    return replace(run, model=replace(run.model, stack=stack), training=training)


def collectives(mesh: MeshConfig, run: Experiment) -> tuple[Collective, ...]:
    """Compiles a training step on CPUs that the mesh cuts."""
    count = mesh.fsdp * mesh.tensor
    placed = make_mesh(replace(mesh, data=1), jax.devices()[:count])
    with jax.set_mesh(placed):
        program = build_program(run, "train", placed)
        lowered = program.function.lower(*program.arguments)
    text = lowered.compile(compiler_options=QUICK_COMPILE).as_text()
    return read_traffic(parse(text), axes=AXES, sizes=placed.axis_sizes).collectives


def gathered(matches: tuple[Collective, ...], axis: str) -> list[Collective]:
    """Returns what gathers or exchanges arrays as large as a matrix along an axis."""
    return [
        one
        for one in matches
        if one.kind in ("all-gather", "all-to-all", "collective-permute")
        and axis in one.axes
        and one.largest >= SMALLEST
    ]


def test_tensor_parallel_products_gather_no_parameter():
    listed = collectives(MeshConfig(tensor=2), wide_transformer())
    assert gathered(listed, "tensor") == []
    # Each branch is summed once forward: the rows' products of w_out and w_down.
    assert any(
        item.kind == "all-reduce" and item.axes == ("tensor",) for item in listed
    )


def test_a_table_that_regresses_is_seen(monkeypatch):
    # w_down cut by its columns, as w_up is: their product no longer stays in place.
    def broken(name):
        rule = find_rule(name)
        columns = name.endswith("w_down")
        return rule._replace(spec=P("fsdp", "tensor")) if columns else rule

    monkeypatch.setattr(sharding, "find_rule", broken)
    listed = collectives(MeshConfig(tensor=2), wide_transformer())
    assert gathered(listed, "tensor") != []


ROWS, LENGTH = 8, 128
ACTIVATION = ROWS * LENGTH * WIDTH * 4
"""Bytes of one layer's output over all devices; parameters are far smaller."""


def long_run(variant: str) -> Experiment:
    """Returns a run whose activations are far larger than its parameters."""
    run = tiny_experiment.config()
    objective = run.objective
    mlp = MlpConfig(kind="gelu", width=2 * WIDTH)
    if variant == "latent_recurrent_transformer":
        objective = Interleaved(subsets=1)
        stack = LatentRecurrentTransformerConfig(
            layers=1,
            width=WIDTH,
            heads=2,
            key_heads=2,
            head_width=8,
            mlp_width=2 * WIDTH,
            vocabulary=run.model.padded_vocabulary,
            length=LENGTH,
            value_gate_channels=WIDTH,
            windows="L",
            memory=MemoryConfig(sources=(1,)),
        )
    elif variant == "rat":
        mixer = RatMixerConfig(heads=2, head_width=8, chunk=16, groups=2)
        stack = RatConfig(layers=1, width=WIDTH, pattern=(mixer,), mlp=mlp)
    else:
        stack = replace(run.model.stack, layers=1, mlp=mlp)
    return replace(
        run,
        model=replace(run.model, stack=stack),
        objective=objective,
        training=replace(run.training, batch=ROWS, length=LENGTH),
    )


@pytest.mark.parametrize(
    "variant", ["transformer", "rat", "latent_recurrent_transformer"]
)
def test_fsdp_cuts_activations_by_rows_and_sums_none(variant):
    listed = collectives(MeshConfig(fsdp=8), long_run(variant))
    whole = [item for item in listed if item.kind in ("all-reduce", "all-gather")]
    assert whole != []
    assert [item for item in whole if item.largest >= ACTIVATION] == []
