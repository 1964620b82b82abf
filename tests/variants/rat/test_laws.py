"""Laws of the stack protocol, for every switch of RAT; and RAT(C = T) is the RNN."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.types import Tokens
from recurjax.variants.rat import RnnMixerConfig
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.rat.switches import (
    HEADS,
    LENGTH,
    SWITCHES,
    VOCABULARY,
    build,
    rat,
    small,
)

BATCH = 2
FIRST = 5  # tokens of the first piece: more than a chunk


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def apply(model, tokens, cache):
    return model(tokens, cache)


def run(model, ids, cache, lengths=None, segments=None):
    """Returns logits as numpy does: slices of them are not compiled."""
    tokens = jax.tree.map(jnp.asarray, Tokens(ids, segments, lengths))
    logits, cache = apply(model, tokens, cache)
    return np.asarray(logits), cache


SLOW = {"no_positions_chunk_of_one"}
PARAMS = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
    for name in SWITCHES
]


@pytest.fixture(scope="module", params=PARAMS)
def model(request):
    return build(SWITCHES[request.param])


@pytest.fixture(scope="module")
def ids():
    draw = np.random.default_rng(1)
    return draw.integers(VOCABULARY, size=(BATCH, LENGTH), dtype=np.int32)


@pytest.fixture(scope="module")
def whole(model, ids):
    return run(model, ids, model.init_cache(BATCH, 0))[0]


def test_future_does_not_leak_into_the_past(model, ids, whole):
    changed = ids.copy()
    changed[:, 8] = (ids[:, 8] + 1) % VOCABULARY
    other, _ = run(model, changed, model.init_cache(BATCH, 0))
    np.testing.assert_array_equal(other[:, :8], whole[:, :8])
    assert np.all(np.any(other[:, 8:] != whole[:, 8:], axis=-1))


def test_batch_rows_do_not_mix(model, ids, whole):
    changed = np.stack([ids[0], (ids[1] + 1) % VOCABULARY])
    other, _ = run(model, changed, model.init_cache(BATCH, 0))
    np.testing.assert_array_equal(other[0], whole[0])
    assert not np.array_equal(other[1], whole[1])


def test_prefill_equals_training(model, ids, whole):
    prefilled, _ = run(model, ids, model.init_cache(BATCH, LENGTH))
    assert_values_close(prefilled, whole)


@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (5, 1, 1, 5, 1)])
def test_any_cut_equals_the_whole(model, ids, whole, pieces):
    cache = model.init_cache(BATCH, LENGTH)
    start, parts = 0, []
    for piece in pieces:
        every = np.full(BATCH, piece, np.int32)
        logits, cache = run(model, ids[:, start : start + piece], cache, every)
        parts.append(logits)
        start += piece
    assert start == LENGTH
    assert_values_close(np.concatenate(parts, axis=1), whole)


def test_ragged_rows_stand_at_their_own_positions(model, ids, whole):
    """Rows advance by their own lengths, from inside chunks and across their ends."""
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


@pytest.mark.parametrize("length", [1, FIRST])
def test_a_row_of_no_tokens_stays_as_it_is(model, ids, length):
    every = np.full(BATCH, FIRST, np.int32)
    before = run(model, ids[:, :FIRST], model.init_cache(BATCH, LENGTH), every)[1]
    nothing = np.zeros(BATCH, np.int32)
    logits, after = run(model, ids[:, FIRST : FIRST + length], before, nothing)
    chex.assert_trees_all_equal(after, before)
    assert np.all(np.isfinite(logits))


def test_packed_documents_do_not_see_each_other(model, ids):
    """Changing the first leaves the second as it was, wherever the cut falls."""
    segments = np.asarray([[0] * 6 + [1] * 7, [0] * 8 + [1] * 5], np.int32)
    cache = model.init_cache(BATCH, 0)
    packed, _ = run(model, ids, cache, segments=segments)
    changed = np.where(segments == 0, (ids + 1) % VOCABULARY, ids)
    other, _ = run(model, changed, cache, segments=segments)
    np.testing.assert_array_equal(other[segments == 1], packed[segments == 1])
    unsplit, _ = run(model, ids, cache)
    assert not np.allclose(unsplit[0, 6:], packed[0, 6:], atol=1e-3)


def test_a_document_that_starts_a_chunk_is_as_it_is_alone(model, ids, whole):
    """Twelve is a multiple of every chunk here; distances alone count."""
    packed = np.concatenate([ids[:, :12], ids], axis=1)
    segments = np.asarray([[0] * 12 + [1] * LENGTH] * BATCH, np.int32)
    logits, _ = run(model, packed, model.init_cache(BATCH, 0), segments=segments)
    assert_values_close(logits[:, 12:], whole)


def test_segments_are_for_training_only(model, ids):
    with pytest.raises(NotImplementedError, match="segments"):
        run(model, ids, model.init_cache(BATCH, LENGTH), segments=np.zeros_like(ids))


@pytest.mark.parametrize(
    "chunk", [LENGTH, pytest.param(2 * LENGTH, marks=pytest.mark.slow)]
)
def test_rat_of_one_chunk_is_the_rnn(ids, chunk):
    """Logits and gradients; q and k then get none."""
    recurrent = RnnMixerConfig(heads=HEADS, head_width=4, gate_horizon=LENGTH)
    one, rnn = build(small(rat(chunk=chunk))), build(small(recurrent))
    leaves = jax.tree_util.tree_leaves_with_path(one)
    shared = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    rnn = jax.tree_util.tree_map_with_path(
        lambda path, _: shared[jax.tree_util.keystr(path)], rnn
    )

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    @partial(jax.value_and_grad, has_aux=True)
    def both(model):
        logits, _ = model(Tokens(jnp.asarray(ids)), model.init_cache(BATCH, 0))
        return jnp.sum(logits**2), logits

    (_, got), of_one = both(one)
    (_, want), of_rnn = both(rnn)
    assert_values_close(got, want)
    gradients = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(of_one)
    }
    for path, leaf in jax.tree_util.tree_leaves_with_path(of_rnn):
        assert_gradients_close(gradients.pop(jax.tree_util.keystr(path)), leaf)
    assert len(gradients) == 2  # w_q and w_k
    assert all(not np.any(leaf) for leaf in gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (5, 1, 7)])
def test_a_text_inside_its_first_chunk_is_read_in_any_pieces(ids, pieces):
    """The authors' generation fails there; no chunk's end exists yet."""
    model = build(small(rat(chunk=LENGTH + 3)))
    whole, _ = run(model, ids, model.init_cache(BATCH, 0))
    cache, start, parts = model.init_cache(BATCH, LENGTH), 0, []
    for piece in pieces:
        every = np.full(BATCH, piece, np.int32)
        logits, cache = run(model, ids[:, start : start + piece], cache, every)
        parts.append(logits)
        start += piece
    assert start == LENGTH and not np.any(cache.groups[0].keys)
    assert_values_close(np.concatenate(parts, axis=1), whole)


def test_states_stay_float32_in_a_bfloat16_model(ids):
    config = dataclasses.replace(SWITCHES["rat"], dtype="bfloat16")
    like = jax.eval_shape(lambda: build(config))
    exact = build(SWITCHES["rat"])
    narrow = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(exact))
    every = np.full(BATCH, LENGTH, np.int32)
    logits, cache = run(narrow, ids, narrow.init_cache(BATCH, LENGTH), every)
    group = cache.groups[0]
    assert group.keys.dtype == jnp.bfloat16 and group.k_state.dtype == jnp.float32
    want, _ = run(exact, ids, exact.init_cache(BATCH, 0))
    assert np.linalg.norm(logits - want) < 0.05 * np.linalg.norm(want)


def test_a_prompt_longer_than_the_cache_is_an_error(ids):
    model = build(SWITCHES["rat"])
    with pytest.raises(ValueError, match="13 tokens in one call do not fit a cache of"):
        run(model, ids, model.init_cache(BATCH, 8))
