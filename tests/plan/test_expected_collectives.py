"""The table of shardings lets no device gather a parameter over `tensor`."""

from dataclasses import replace

import jax

from recurjax import sharding
from recurjax.layers.mlp import MlpConfig
from recurjax.plan.collectives import Collective
from recurjax.plan.hlo import parse
from recurjax.plan.programs import build_program
from recurjax.plan.traffic import read_traffic
from recurjax.sharding import AXES, MeshConfig, P, make_mesh
from tests.compiling import QUICK_COMPILE
from tests.training import tiny_experiment

WIDTH, FEED_FORWARD = 16, 512
SMALLEST = WIDTH * FEED_FORWARD * 4
"""Bytes of one layer's feed-forward matrix; activations are far smaller."""


def collectives(mesh: MeshConfig) -> tuple[Collective, ...]:
    """Compiles a training step on CPUs that the mesh cuts."""
    run = tiny_experiment.config()
    mlp = MlpConfig(kind="gelu", width=FEED_FORWARD)
    stack = replace(run.model.stack, layers=1, mlp=mlp)
    training = replace(run.training, batch=4, length=4)
    run = replace(run, model=replace(run.model, stack=stack), training=training)
    count = mesh.fsdp * mesh.tensor
    placed = make_mesh(replace(mesh, data=1), jax.devices()[:count])
    with jax.set_mesh(placed):
        program = build_program(run, "train", placed)
        lowered = program.function.lower(*program.arguments)
    text = lowered.compile(compiler_options=QUICK_COMPILE).as_text()
    return read_traffic(parse(text), axes=AXES, sizes=placed.axis_sizes).collectives


def gathered(found: tuple[Collective, ...], axis: str) -> list[Collective]:
    """Returns what gathers or exchanges arrays as large as a matrix along an axis."""
    return [
        one
        for one in found
        if one.kind in ("all-gather", "all-to-all", "collective-permute")
        and axis in one.axes
        and one.largest >= SMALLEST
    ]


def test_tensor_parallel_products_gather_no_parameter():
    found = collectives(MeshConfig(tensor=2))
    assert gathered(found, "tensor") == []
    # Each branch is summed once forward: the rows' products of w_out and w_down.
    assert any(one.kind == "all-reduce" and one.axes == ("tensor",) for one in found)


def test_a_table_that_regresses_is_seen(monkeypatch):
    # w_down cut by its columns, as w_up is: their product no longer stays in place.
    broken = ((r"\bw_down$", P("fsdp", "tensor")), *sharding.RULES)
    monkeypatch.setattr(sharding, "RULES", broken)
    assert gathered(collectives(MeshConfig(tensor=2)), "tensor") != []
