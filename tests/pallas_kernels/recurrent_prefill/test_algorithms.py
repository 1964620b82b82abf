"""The paper's Algorithms 1 and 2 compute the layer of the reference."""

import jax
import numpy as np
import pytest

from pallas_kernels.recurrent_prefill import algorithms
from pallas_kernels.recurrent_prefill.reference import recurrent_prefill_reference
from tests.compiling import QUICK_COMPILE
from tests.pallas_kernels.recurrent_prefill.layers import SPECS, rows, weights

# N 1, a power of two, a prime and a length that ends inside a tile; P above the tile.
CASES = [
    ("alibi", 1, 1),
    ("alibi", 7, 2),
    pytest.param("alibi", 16, 16, marks=pytest.mark.slow),
    pytest.param(
        "grouped rope layer norm swiglu biases", 13, 64, marks=pytest.mark.slow
    ),
    pytest.param("multi query, norm-free, no qk-norm", 9, 4, marks=pytest.mark.slow),
    pytest.param("un-normed persistent pair", 11, 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "length", "tile"), CASES)
def test_the_papers_algorithms_are_the_reference(name, length, tile):
    spec = SPECS[name]
    with jax.enable_x64(True):
        x, stacked = rows(3, length), weights(spec, layers=1)
        w = jax.tree.map(lambda leaf: leaf[0], stacked)

        @jax.jit
        def both(x, w, stacked):
            tiled = algorithms.recurrent_layer_tiled(x, w, spec=spec, tile=tile)
            return tiled, recurrent_prefill_reference(x, stacked, spec=spec)

        program = both.lower(x, w, stacked).compile(compiler_options=QUICK_COMPILE)
        np.testing.assert_allclose(*program(x, w, stacked), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("length", "tile"), [(1, 1), (8, 64), (13, 2), (64, 4)])
def test_the_traffic_is_what_the_tiles_read(length, tile):
    calls = []
    for t in range(1, length):
        P = t & -t
        for u in range(t, min(t + P, length), tile):
            calls.append((P, min(u + tile, t + P, length) - u))
    pairs, states = algorithms.vectors_moved(length, tile=tile)
    assert pairs == length + sum(keys for keys, _ in calls)
    assert states == length + sum(queries for _, queries in calls)
    # Every query meets every earlier pair once.
    assert sum(k * q for k, q in calls) == length * (length - 1) // 2
    if tile >= length and length == 8:
        assert pairs == 8 + 12  # N / 2 log2 N
