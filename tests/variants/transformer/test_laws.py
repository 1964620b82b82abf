"""Laws of the stack protocol, for every switch of the baseline."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_values_close
from tests.variants.transformer.switches import (
    LENGTH,
    SWITCHES,
    VOCABULARY,
    build,
    small,
)

RINGS = ["rope_grouped_ring", "alibi_full_norm_rings"]
BATCH = 2
FIRST = 5  # tokens of the first piece: longer than the smallest rings


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def apply(model, tokens, cache):
    return model(tokens, cache)


def run(model, ids, cache, lengths=None, segments=None):
    """Returns logits as numpy does: slices of them are not compiled."""
    logits, cache = apply(model, Tokens(ids, segments, lengths), cache)
    return np.asarray(logits), cache


@pytest.fixture(scope="module", params=SWITCHES)
def model(request):
    return build(SWITCHES[request.param])


@pytest.fixture(scope="module")
def ids():
    draw = np.random.default_rng(1)
    return draw.integers(VOCABULARY, size=(BATCH, LENGTH), dtype=np.int32)


@pytest.fixture(scope="module")
def whole(model, ids):
    return run(model, ids, model.init_cache(BATCH, 0))[0]


def test_logits_leave_out_the_padded_vocabulary(whole):
    assert whole.shape == (BATCH, LENGTH, VOCABULARY)
    assert whole.dtype == jnp.float32


def test_future_does_not_leak_into_the_past(model, ids, whole):
    changed = ids.copy()
    changed[:, 8] = (ids[:, 8] + 1) % VOCABULARY
    other, _ = run(model, changed, model.init_cache(BATCH, 0))
    np.testing.assert_array_equal(other[:, :8], whole[:, :8])
    assert not np.array_equal(other[:, 8:], whole[:, 8:])


@pytest.mark.parametrize("switch", RINGS[:1])
def test_gradients_do_not_leak_into_the_future(switch, ids):
    model = build(SWITCHES[switch])
    x = np.random.default_rng(2).normal(size=(BATCH, LENGTH, 8)).astype(np.float32)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    @jax.grad
    def of_input(x):
        cache = model.stack.init_cache(BATCH, 0, x.dtype)
        h, _ = model.stack(x, cache, Tokens(ids))
        return jnp.sum(h[:, 8] ** 2)

    gradient = np.asarray(of_input(x))
    np.testing.assert_array_equal(gradient[:, 9:], 0)
    assert np.all(np.any(gradient[:, 8] != 0, axis=-1))


def test_batch_rows_do_not_mix(model, ids, whole):
    changed = np.stack([ids[0], (ids[1] + 1) % VOCABULARY])
    other, _ = run(model, changed, model.init_cache(BATCH, 0))
    np.testing.assert_array_equal(other[0], whole[0])
    assert not np.array_equal(other[1], whole[1])


def test_prefill_equals_training(model, ids, whole):
    prefilled, _ = run(model, ids, model.init_cache(BATCH, LENGTH))
    assert_values_close(prefilled, whole)


@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (5, 1, 1, 5, 1), (1, 5, 5, 1, 1)])
def test_any_cut_equals_the_whole(model, ids, whole, pieces):
    cache = model.init_cache(BATCH, LENGTH)
    assert_values_close(in_pieces(model, ids, cache, pieces), whole)


def test_ragged_rows_stand_at_their_own_positions(model, ids, whole):
    """Rows advance by their own lengths; pads would overwrite rings if they could."""
    cache = model.init_cache(BATCH, LENGTH)
    seen = np.zeros(BATCH, int)
    for lengths in ([5, 2], [2, 5], [5, 0], [0, 4], [1, 1]):
        offset = np.arange(FIRST)
        real = offset < np.asarray(lengths)[:, None]
        at = np.where(real, np.minimum(seen[:, None] + offset, LENGTH - 1), 0)
        piece = np.where(real, np.take_along_axis(ids, at, axis=1), np.int32(3))
        logits, cache = run(model, piece, cache, np.asarray(lengths, np.int32))
        for row, count in enumerate(lengths):
            wanted = whole[row, seen[row] : seen[row] + count]
            assert_values_close(logits[row, :count], wanted)
        seen += lengths
    assert list(seen) == [13, 12]


def test_what_pads_hold_changes_nothing(model, ids):
    lengths = np.asarray([5, 2], np.int32)
    other = ids[:, :FIRST].copy()
    other[1, 2:] = (other[1, 2:] + 1) % VOCABULARY
    results = []
    for piece in (ids[:, :FIRST], other):
        cache = model.init_cache(BATCH, LENGTH)
        logits, cache = run(model, piece, cache, lengths)
        results.append((logits[0], logits[1, :2], cache))
    chex.assert_trees_all_equal(*results)


def test_a_row_of_no_tokens_stays_as_it_is(model, ids):
    before = run(model, ids[:, :FIRST], model.init_cache(BATCH, LENGTH))[1]
    nothing = np.zeros(BATCH, np.int32)
    logits, after = run(model, ids[:, FIRST : 2 * FIRST], before, nothing)
    chex.assert_trees_all_equal(after, before)
    assert np.all(np.isfinite(logits))


@pytest.mark.parametrize(
    "switch", [name for name in SWITCHES if not name.startswith("learned")]
)
def test_packed_documents_do_not_see_each_other(switch, ids):
    model = build(SWITCHES[switch])
    second = LENGTH - 6
    segments = np.asarray([[0] * 6 + [1] * second, [0] * second + [1] * 6], np.int32)
    packed = np.stack([ids[0], np.roll(ids[0], -6)])
    cache = model.init_cache(BATCH, 0)
    logits, _ = run(model, packed, cache, segments=segments)
    assert_values_close(logits[1, :second], logits[0, 6:])
    assert_values_close(logits[1, second:], logits[0, :6])
    unsplit, _ = run(model, packed, cache)
    assert not np.allclose(unsplit[0, 6:], logits[0, 6:], atol=1e-3)


@pytest.mark.parametrize("switch", RINGS[:1])
def test_float64_is_float32_with_more_digits(switch, ids):
    model = build(SWITCHES[switch])
    narrow, _ = run(model, ids, model.init_cache(BATCH, 0))
    with jax.enable_x64(True):
        wide = with_dtype(model, "float64")
        whole, _ = run(wide, ids, wide.init_cache(BATCH, 0))
        assert whole.dtype == np.float64
        assert_values_close(narrow, whole)
        cache = wide.init_cache(BATCH, LENGTH)
        parts = in_pieces(wide, ids, cache, (5, 1, 1, 5, 1))
        assert_values_close(parts, whole, "float64")


@pytest.mark.parametrize("switch", RINGS)
def test_bfloat16_costs_little_more_than_rounding_the_weights(switch, ids):
    model = build(SWITCHES[switch])
    exact, _ = run(model, ids, model.init_cache(BATCH, 0))
    rounded = jax.tree.map(round_to_bfloat16, model)
    best, _ = run(rounded, ids, rounded.init_cache(BATCH, 0))
    narrow = with_dtype(model, "bfloat16")
    logits, cache = run(narrow, ids, narrow.init_cache(BATCH, LENGTH))
    assert cache.groups[0].keys.dtype == jnp.bfloat16
    assert logits.dtype == np.float32
    size = np.linalg.norm(exact)
    error = np.linalg.norm(logits - exact) / size
    assert 0 < error < 4 * np.linalg.norm(best - exact) / size
    assert error < 0.05


def test_a_window_that_covers_all_equals_none(ids):
    """A ring longer than the sequence is a plain cache."""
    full, windowed = (build(small(windows=(window,))) for window in (None, LENGTH - 1))
    cache = windowed.init_cache(BATCH, 3 * LENGTH)
    assert cache.groups[0].slots == LENGTH
    want, _ = run(full, ids, full.init_cache(BATCH, 0))
    assert_values_close(run(windowed, ids, windowed.init_cache(BATCH, 0))[0], want)
    assert_values_close(run(windowed, ids, cache)[0], want)


def test_a_window_hides_what_lies_before_it(ids):
    model = build(small(layers=1, windows=(3,)))
    whole, _ = run(model, ids, model.init_cache(BATCH, 0))
    changed = ids.copy()
    changed[:, 0] = (ids[:, 0] + 1) % VOCABULARY
    other, _ = run(model, changed, model.init_cache(BATCH, 0))
    np.testing.assert_array_equal(other[:, 4:], whole[:, 4:])
    assert np.all(np.any(other[:, 3] != whole[:, 3], axis=-1))


def test_rings_hold_their_window_and_no_more():
    cache = build(small(layers=4, windows=(3, None))).init_cache(2, 64)
    assert [group.slots for group in cache.groups] == [4, 64]
    assert cache.groups[0].keys.shape == (2, 2, 4, 4, 4)


def in_pieces(model, ids, cache, pieces):
    start, parts = 0, []
    for piece in pieces:
        every = np.full(BATCH, piece, np.int32)
        logits, cache = run(model, ids[:, start : start + piece], cache, every)
        parts.append(logits)
        start += piece
    assert start == ids.shape[1]
    return np.concatenate(parts, axis=1)


def with_dtype(model, dtype: str):
    """The same float32 weights in a model that computes in another dtype."""
    config = dataclasses.replace(model.config, dtype=dtype)
    like = jax.eval_shape(lambda: build(config))
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(model))


def round_to_bfloat16(weight):
    return np.asarray(weight).astype(jnp.bfloat16).astype(np.float32)
