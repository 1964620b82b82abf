"""What a program computes by the variant's own count, and how often it reads tokens."""

from dataclasses import replace

import jax
import pytest

from pallas_kernels.target import Target, as_if
from recurjax.plan.flops import count_flops
from recurjax.plan.programs import build_program
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training.objective import NextToken, Objective
from recurjax.variants.latent_recurrent_transformer.objectives import (
    Chunked,
    Interleaved,
)
from tests.plan.small_experiments import experiment


def products(objective: Objective) -> int:
    """Counts FLOPs of products of a training step that makes nothing twice."""
    run = experiment("latent_recurrent_transformer", "float32")
    stack = replace(run.model.stack, remat="nothing", length=64)
    run = replace(
        run,
        model=replace(run.model, stack=stack),
        training=replace(run.training, batch=1, length=64),
        objective=objective,
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    program = build_program(run, "train", mesh)
    with as_if(Target.of(jax.devices()[0])):  # As a plan does: no kernel in C++.
        traced = program.function.trace(*program.arguments)
    return count_flops(traced.jaxpr, platform="cpu").products


@pytest.mark.parametrize("objective", [Interleaved(subsets=2), Chunked(chunk=32)])
def test_passes_are_those_of_the_traced_program(objective):
    passes = products(objective) / products(NextToken())
    # A pass over a part of the tokens computes fewer logits that causality hides.
    assert passes == pytest.approx(objective.passes, rel=0.1)


def test_a_prefill_is_a_third_of_training_on_its_rows_and_positions():
    run = experiment("transformer")
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    program = build_program(run, "prefill", mesh, rows=3, length=64)
    assert program.tokens == 3 * 64
    assert program.own_flops == 3 * 64 * run.model.flops_per_token(64) / 3
