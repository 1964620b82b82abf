"""How many layers of a stack one turn of a program's loop computes."""

import jax.numpy as jnp
import pytest

from pallas_kernels.target import Target, as_if
from recurjax.layers.stack import layers_a_turn

TARGETS = {
    "cpu": Target(platform="cpu", kind="cpu"),
    "gpu": Target(platform="gpu", kind="NVIDIA H100", compute_capability="9.0"),
    "tpu": Target(platform="tpu", kind="TPU v5 lite"),
}


@pytest.mark.parametrize(
    "platform, positions, cached, turns, layers",
    [
        ("gpu", 1, True, 12, 12),  # A decode step: every layer.
        ("gpu", 1, False, 12, 3),
        ("gpu", 5, True, 12, 3),
        ("gpu", 5, False, 2, 2),  # No more than there are.
        ("cpu", 1, True, 12, 3),
        ("tpu", 1, True, 12, 3),
        ("tpu", 1, True, 2, 2),
        ("tpu", 5, True, 2, 1),
    ],
)
def test_a_decode_step_unrolls_where_that_reads_weights_in_place(
    platform, positions, cached, turns, layers
):
    unroll = 1 if (platform, positions) == ("tpu", 5) else 3
    with as_if(TARGETS[platform]):
        x = jnp.zeros((1, positions, 4))
        assert layers_a_turn(x, unroll, turns, cached=cached) == layers
