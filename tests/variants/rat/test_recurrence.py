"""Gradients that RAT's equations write out, and what they save."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.variants.rat.recurrence import with_ends
from tests.absent_compilers import COMPILERS, ask
from tests.tolerances import assert_values_close


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), "float32")


def assert_same_values_and_gradients(function, plain, *arrays):
    def both(function):
        out, pull = jax.vjp(function, *arrays)
        return out, pull(jax.tree.map(jnp.cos, out))

    assert_values_close(jax.jit(lambda: both(function))(), both(plain))


@pytest.mark.parametrize("chunks, size", [(3, 4), (1, 5), (4, 1)])
def test_ends_add_their_gradient_where_they_stand(chunks, size):
    def plain(states):
        return states, states[:, size - 1 :: size]

    states = drawn(2, chunks * size, 3)
    assert_same_values_and_gradients(lambda x: with_ends(x, size), plain, states)


@pytest.mark.slow
def test_no_gradient_of_all_keys_is_read_and_written():
    """With logits made behind the scan it is, and k~ is read twice more."""
    if not (COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")
    row = ask("h100", "tests.variants.rat.traffic:traffic")
    assert row["bytes"] < 3.35 * row["least"]
