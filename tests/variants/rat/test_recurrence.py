"""Gradients that RAT's equations write out, and what they save."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.variants.rat.recurrence import own_logits, with_ends
from tests.absent_compilers import COMPILERS, ask
from tests.tolerances import assert_values_close


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), "float32")


def assert_same_values_and_gradients(function, plain, *arrays):
    def both(function):
        out, pull = jax.vjp(function, *arrays)
        return out, pull(jax.tree.map(jnp.cos, out))

    assert_values_close(jax.jit(lambda: both(function))(), both(plain))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_own_logits_are_products_with_the_tiled_queries(groups):
    def plain(q, k):
        return jnp.sum(jnp.tile(q, (1, 1, 6 // groups, 1)) * k, axis=-1)

    q, k = drawn(2, 5, groups, 4), drawn(2, 5, 6, 4)
    assert_same_values_and_gradients(own_logits, plain, q, k)


@pytest.mark.parametrize("chunks, size", [(3, 4), (1, 5), (4, 1)])
def test_ends_add_their_gradient_where_they_stand(chunks, size):
    def plain(states):
        return states, states[:, size - 1 :: size]

    states = drawn(2, chunks * size, 3)
    assert_same_values_and_gradients(lambda x: with_ends(x, size), plain, states)


@pytest.mark.slow
def test_no_gradient_of_all_states_is_read_and_written_for_the_chunks_ends():
    """Ends padded and queries tiled in memory were three more arrays of all states."""
    if not (COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")
    row = ask("h100", "tests.variants.rat.traffic:traffic")
    assert row["bytes"] < 3.95 * row["least"]
