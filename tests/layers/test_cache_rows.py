"""Rows of every variant's cache, emptied and filled while the neighbours decode on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_values_close
from tests.variants.latent_recurrent_transformer import switches as latent
from tests.variants.rat import switches as rat
from tests.variants.recurformer import switches as recurformer
from tests.variants.recurrent_transformer import switches as recurrent
from tests.variants.relaxed_recursive_transformer import switches as recursive
from tests.variants.transformer import switches as transformer

MODELS = {
    "transformer, rings": transformer.SWITCHES["rope_grouped_ring"],
    "recurrent, open blocks": recurrent.SWITCHES["learned_positions_blocks_of_three"],
    "rat and windows": rat.SWITCHES["low_rank_by_token_beside_windows"],
    "rnn": rat.SWITCHES["rnn"],
    "reversed": rat.SWITCHES["reversed"],
    "recursive, rings": recursive.SWITCHES["cycle, untied, rank 3, rings"],
    "latent, lags": latent.SWITCHES["keys, averaged lags, reset"],
    "recurformer": recurformer.SWITCHES["ragged_groups"],
}
ROWS, PROMPT, LENGTH = 3, 5, 12
AT = 1  # the row that is emptied and filled


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def apply(model, ids, cache):
    return model(Tokens(ids), cache)


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """Returns the model, three rows' prompts and next tokens, and their cache."""
    model = transformer.build(MODELS[request.param])
    draw = np.random.default_rng(3)
    vocabulary = model.config.vocabulary
    ids = draw.integers(vocabulary, size=(ROWS, PROMPT), dtype=np.int32)
    more = draw.integers(vocabulary, size=(ROWS, 1), dtype=np.int32)
    _, cache = apply(model, ids, model.init_cache(ROWS, LENGTH))
    return model, ids, more, cache


def test_a_reset_row_equals_a_fresh_one(case):
    model, ids, _, cache = case
    rows = jnp.arange(ROWS) == AT
    emptied = jax.jit(model.stack.reset)(cache, rows)
    fresh = model.init_cache(ROWS, LENGTH)
    compare_rows(model, emptied, {AT: fresh, 0: cache, 2: cache})
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(emptied), jax.tree.leaves(cache), strict=True)
    )
    # What follows in it is what follows from nothing; the neighbours go on.
    again, _ = apply(model, ids, emptied)
    want, _ = apply(model, ids, fresh)
    on, _ = apply(model, ids, cache)
    np.testing.assert_array_equal(again[AT], want[AT])
    np.testing.assert_array_equal(again[0], on[0])
    np.testing.assert_array_equal(again[2], on[2])


def test_an_inserted_row_equals_its_own_decoding(case):
    model, ids, more, cache = case
    other = (ids[AT : AT + 1] + 1) % model.config.vocabulary
    _, alone = apply(model, other, model.init_cache(1, LENGTH))
    mixed = jax.jit(model.stack.insert)(cache, jnp.int32(AT), alone)
    compare_rows(model, mixed, {0: cache, 2: cache})
    got, _ = apply(model, more, mixed)
    own, _ = apply(model, more[AT : AT + 1], alone)
    assert_values_close(got[AT], own[0])
    before, _ = apply(model, more, cache)
    np.testing.assert_array_equal(got[0], before[0])
    np.testing.assert_array_equal(got[2], before[2])
    assert not np.allclose(got[AT], before[AT], atol=1e-3)


def test_a_cache_of_another_length_is_refused(case):
    model, _, _, cache = case
    two = model.init_cache(2, LENGTH)
    with pytest.raises(ValueError, match="a cache of one row"):
        model.stack.insert(cache, 0, two)


def test_rows_taken_go_on_as_the_rows_they_were(case):
    """In another order, and one of them twice."""
    model, _, more, cache = case
    rows = np.array([2, 0, 2])
    following = np.repeat(more[:1], ROWS, axis=0)
    want, _ = apply(model, following, cache)
    taken = jax.jit(model.stack.take)(cache, jnp.asarray(rows))
    got, _ = apply(model, following, taken)
    assert_values_close(got, np.asarray(want)[rows])


def compare_rows(model, got, wanted: dict):
    """Compares rows of caches to the bit; the axis of rows is the one that grows."""
    one, two = (jax.eval_shape(lambda b=b: model.init_cache(b, 4)) for b in (1, 2))
    small, large, got = (jax.tree.leaves(tree) for tree in (one, two, got))
    seen = 0
    for row, tree in wanted.items():
        for a, b, mine, theirs in zip(
            small, large, got, jax.tree.leaves(tree), strict=True
        ):
            if a.shape == b.shape:
                continue
            (axis,) = np.flatnonzero(np.not_equal(a.shape, b.shape))
            np.testing.assert_array_equal(
                np.take(np.asarray(mine), row, axis),
                np.take(np.asarray(theirs), row, axis),
            )
            seen += 1
    assert seen >= 2 * len(wanted)
