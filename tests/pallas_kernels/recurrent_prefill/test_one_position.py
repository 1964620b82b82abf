"""A decode step on accelerators against the loop over tiles, which CPUs run."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_prefill import recurrent_prefill
from pallas_kernels.recurrent_prefill.arrays import Rows, empty_cache
from pallas_kernels.target import Target, as_if
from tests.pallas_kernels.recurrent_prefill.layer_cases import WIDTH, Case, quick_jit
from tests.tolerances import assert_values_close

PLAIN = Case(positions=1, layers=2, batch=3)
SWITCHES = PLAIN._replace(
    key_heads=1,
    norm="layer",
    gated=True,
    biases=True,
    activation="silu",
    normed_persistent=False,
)
H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")


def step(case: Case):
    """Returns the function of one step, and its arguments: rows at three places."""
    x, weights, _ = case.inputs()
    cache = empty_cache(case.layers, case.batch, 8, case.spec)
    keys = jax.random.split(jax.random.key(1), 2)
    cache = cache._replace(
        keys=jax.random.normal(keys[0], cache.keys.shape),
        values=jax.random.normal(keys[1], cache.values.shape),
        position=jnp.asarray([7, 4, 0], jnp.int32)[: case.batch],
    )
    rows = Rows(lengths=jnp.asarray([1, 0, 1])[: case.batch])
    return partial(recurrent_prefill, spec=case.spec), (x, weights, cache), rows


@pytest.mark.parametrize(
    "case",
    [PLAIN, SWITCHES, PLAIN._replace(batch=1, layers=1)],
    ids=["plain", "switches", "one row"],
)
def test_a_step_is_that_of_the_loop_over_tiles(case):
    run, arguments, rows = step(case)
    want_z, want = quick_jit(run)(*arguments, rows=rows)
    with as_if(H100):
        z, cache = quick_jit(run)(*arguments, rows=rows)
    # The second row has no token: what it computes has no meaning.
    assert_values_close(z[::2], want_z[::2])
    assert_values_close((cache.keys, cache.values), (want.keys, want.values))
    assert cache.position.tolist() == [8, 4, 1][: case.batch]


def test_a_step_makes_no_copy_of_its_weights_side_by_side():
    run, arguments, rows = step(PLAIN)
    with as_if(H100):
        traced = str(jax.make_jaxpr(partial(run, rows=rows))(*arguments))
    # Weights [.., D, N]: what is told by its place is a concatenation too.
    assert "dot_general" in traced
    assert not re.findall(rf"\[(?:\d+,)*{WIDTH},\d+\] = concatenate", traced)
