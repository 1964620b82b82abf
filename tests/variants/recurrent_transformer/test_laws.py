"""Laws of the stack protocol, for every switch of the variant."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.layers.self_attention import AttentionConfig
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.types import Tokens
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.recurrent_transformer.recurrence import recurrent_layer
from recurjax.variants.transformer import TransformerConfig
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_values_close
from tests.variants.recurrent_transformer.switches import (
    LENGTH,
    SWITCHES,
    VOCABULARY,
    small,
)
from tests.variants.transformer.switches import build

BATCH, FIRST = 2, 5
quick = partial(jax.jit, compiler_options=QUICK_COMPILE)


@quick
def apply(model, tokens, cache):
    return model(tokens, cache)


def run(model, ids, cache, lengths=None, segments=None):
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


def test_future_does_not_leak_into_the_past(model, ids, whole):
    changed = ids.copy()
    changed[:, 8] = (ids[:, 8] + 1) % VOCABULARY
    other, _ = run(model, changed, model.init_cache(BATCH, 0))
    np.testing.assert_array_equal(other[:, :8], whole[:, :8])
    assert not np.array_equal(other[:, 8:], whole[:, 8:])


def test_batch_rows_do_not_mix(model, ids, whole):
    changed = np.stack([ids[0], (ids[1] + 1) % VOCABULARY])
    other, _ = run(model, changed, model.init_cache(BATCH, 0))
    np.testing.assert_array_equal(other[0], whole[0])
    assert not np.array_equal(other[1], whole[1])


@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (5, 1, 1, 5, 1)])
def test_any_cut_equals_the_whole(model, ids, whole, pieces):
    cache, start, parts = model.init_cache(BATCH, LENGTH), 0, []
    for piece in pieces:
        every = np.full(BATCH, piece, np.int32)
        logits, cache = run(model, ids[:, start : start + piece], cache, every)
        parts.append(logits)
        start += piece
    assert_values_close(np.concatenate(parts, axis=1), whole)


def test_ragged_rows_stand_at_their_own_positions(model, ids, whole):
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


def test_packed_documents_do_not_see_each_other(ids):
    model = build(SWITCHES["the_paper"])
    second = LENGTH - 6
    segments = np.asarray([[0] * 6 + [1] * second, [0] * second + [1] * 6], np.int32)
    packed = np.stack([ids[0], np.roll(ids[0], -6)])
    cache = model.init_cache(BATCH, 0)
    logits, _ = run(model, packed, cache, segments=segments)
    assert_values_close(logits[1, :second], logits[0, 6:])
    assert_values_close(logits[1, second:], logits[0, :6])
    unsplit, _ = run(model, packed, cache)
    assert not np.allclose(unsplit[0, 6:], logits[0, 6:], atol=1e-3)


@pytest.mark.parametrize("schedule", ["naive", "prefix", "tiled", "wavefront"])
def test_the_schedule_changes_nothing_but_rounding(ids, schedule):
    want, _ = run(build(small(tile=16)), ids, build(small()).init_cache(BATCH, 0))
    tile = None if schedule == "naive" else 3
    model = build(small(schedule=schedule, tile=tile))
    assert_values_close(run(model, ids, model.init_cache(BATCH, 0))[0], want)


def test_one_block_is_the_transformer_and_so_is_position_0(ids):
    config = small(block=LENGTH, tile=None)
    transformer = dataclasses.replace(config, stack=as_transformer(config.stack))
    baseline = build(transformer)
    want, _ = run(baseline, ids, baseline.init_cache(BATCH, 0))
    for block in (LENGTH, 1):
        model = build(small(block=block, tile=None))
        # The same weights under the baseline's names.
        nested = to_nested_dict(baseline)
        nested["stack"]["blocks"] = nested["stack"]["blocks"]["0"]
        model = from_nested_dict(model, nested)
        got, _ = run(model, ids, model.init_cache(BATCH, 0))
        seen = slice(None) if block > 1 else slice(1)
        assert_values_close(got[:, seen], want[:, seen])
    assert not np.allclose(got[:, 1:], want[:, 1:], atol=1e-3)


@pytest.mark.parametrize(
    "switch", ["the_paper", "grouped_rope_layer_norm_biases_wavefront"]
)
def test_the_stack_is_the_papers_equations(switch):
    model = build(SWITCHES[switch])
    x = np.random.default_rng(3).normal(size=(BATCH, 5, 8)).astype(np.float32)
    stack = model.stack

    @quick
    def by_equations(stack, x):
        for layer in range(stack.config.layers):
            block = jax.tree.map(lambda leaf, i=layer: leaf[i], stack.blocks)
            x = recurrent_layer(block, stack.config, x)
        return x

    @quick
    def by_op(stack, x):
        tokens = Tokens(jnp.zeros(x.shape[:2], jnp.int32))
        return stack(x, stack.init_cache(BATCH, 0, x.dtype), tokens)[0]

    assert_values_close(by_op(stack, x), by_equations(stack, x))


def as_transformer(config: RecurrentTransformerConfig) -> TransformerConfig:
    """The Transformer with the same weights."""
    attention = AttentionConfig(
        heads=config.heads,
        key_heads=config.key_heads,
        head_width=config.head_width,
        position=config.position,
        qk_norm=config.qk_norm,
        qk_norm_over="full",
    )
    return TransformerConfig(
        layers=config.layers,
        width=config.width,
        attention=attention,
        mlp=config.mlp,
        residual_scale=config.residual_scale,
    )
