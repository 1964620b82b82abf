"""LRT's memory on RAT's pattern: its schedules, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.model import as_latent_memory
from recurjax.training.objective import NextToken, refuses_segments
from recurjax.types import Batch, Tokens
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from recurjax.variants.latent_recurrent_transformer.objectives import (
    Chunked,
    Interleaved,
    interleaved_passes,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import rms
from recurjax.variants.rat import presets
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from tests.laws import B, T, draw_ids, quick
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.rat.switches import (
    SWITCHES,
    VOCABULARY,
    build,
    rat,
    small,
    with_memory,
)

SHORT = 4


@pytest.fixture(scope="module")
def model():
    return build(SWITCHES["rat_with_memory"])


@pytest.fixture(scope="module")
def ids():
    return jnp.asarray(draw_ids(VOCABULARY))


@quick
def exact(model, ids):
    x = model.embed(ids)
    return model.stack(x, model.stack.init_cache(B, 0, x.dtype), Tokens(ids))[0]


def test_a_token_receives_what_a_layer_left_for_the_one_before(model, ids):
    """By the equation, layer after layer and token after token."""
    stack, tokens = model.stack, Tokens(ids)

    @quick
    def by_hand(model, ids):
        stack = model.stack
        group = stack.init_cache(B, T, jnp.float32).groups[0]
        memory, outputs = jnp.zeros((B, 1, stack.config.width)), []
        for t in range(SHORT):
            token, x = Tokens(ids[:, t : t + 1]), model.embed(ids[:, t : t + 1])
            for layer in range(stack.config.layers):
                block = jax.tree.map(lambda w, at=layer: w[at], stack.blocks[0])
                group = group._replace(layer=jnp.int32(layer), position=jnp.full(B, t))
                x = x + block.memory_scale[...] * memory
                x, group = block(x, group, token)
                if layer == 0:  # source 1
                    state = rms(x)
            memory = state
            outputs.append(x)
        return jnp.concatenate(outputs, axis=1)

    assert stack.config.memory.sources == (1,) and tokens.segments is None
    assert_values_close(exact(model, ids)[:, :SHORT], by_hand(model, ids))


def test_as_many_sweeps_as_tokens_are_exact(model, ids):
    sweep = quick(
        lambda model, ids: model.stack.sweep(
            model.embed(ids), model.init_cache(B, SHORT), Tokens(ids), sweeps=SHORT
        )
    )
    y, cache, residual = sweep(model, ids[:, :SHORT])
    assert_values_close(y, exact(model, ids)[:, :SHORT])
    assert residual < 1e-5 and np.all(np.asarray(cache.position) == SHORT)


def test_chunks_of_one_token_are_exact(model, ids):
    """Loss and gradients are next-token prediction's."""
    short = Batch(ids[:, :SHORT], ids[:, 1 : SHORT + 1])
    of = lambda objective: quick(  # noqa: E731
        jax.value_and_grad(lambda model, batch: objective(model, batch)[0])
    )(model, short)
    (one, gradients), (other, expected) = of(Chunked(chunk=1)), of(NextToken())
    assert_values_close(one, other)
    jax.tree.map(assert_gradients_close, gradients, expected)


def test_chunks_refuse_documents(model, ids):
    with pytest.raises(NotImplementedError, match="takes no segments"):
        Chunked(chunk=4).states(model, Batch(ids, ids, jnp.zeros_like(ids)))
    for objective in (Chunked(chunk=4), NextToken()):
        reason = refuses_segments(objective, model.config)
        assert reason is not None and reason.endswith("or train with Interleaved")
    assert refuses_segments(Interleaved(subsets=1), model.config) is None


def test_no_memory_crosses_from_a_document_to_the_next(model, ids):
    """By the rows' segments alone, without a reset token."""
    segments = jnp.asarray(np.arange(T) >= SHORT, jnp.int32)[None].repeat(B, 0)

    @quick
    def states(model, ids):
        batch = Batch(ids, ids, segments)
        return Interleaved(subsets=1).states(model, batch)

    def changed(t):
        return ids.at[:, t].set((ids[:, t] + 1) % VOCABULARY)

    want, before, first = (
        np.asarray(states(model, each)) for each in (ids, changed(2), changed(SHORT))
    )
    assert np.abs(before - want)[:, 3].max() > 1e-3
    np.testing.assert_array_equal(before[:, SHORT:], want[:, SHORT:])
    assert np.abs(first - want)[:, SHORT + 1].max() > 1e-3


def test_the_second_pass_has_the_states_of_the_first(model, ids):
    @quick
    def both(model, ids):
        first, second = interleaved_passes(model, Batch(ids, ids), (slice(0, None, 1),))
        stack, tokens = model.stack, Tokens(ids)
        _, states = stack.initial(model.embed(ids), tokens)
        enters = jnp.pad(states, [(0, 0), (1, 0), (0, 0)])[:, :-1]
        cache = stack.init_cache(B, T, jnp.float32)
        y, _ = stack.on_cache(model.embed(ids), enters, cache, tokens)
        none = stack.without_memory(model.embed(ids), tokens)
        return first[1], model.final_norm(none), second[1], model.final_norm(y)

    first, none, second, expected = both(model, ids)
    assert_values_close(first, none)
    assert_values_close(second, expected)
    assert np.abs(np.asarray(first - second)).max() > 1e-2


def test_a_memory_of_factor_zero_changes_nothing(model, ids):
    plain = build(small(rat()))
    shared = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }
    plain = jax.tree_util.tree_map_with_path(
        lambda path, _: shared[jax.tree_util.keystr(path)], plain
    )
    without = jax.tree_util.tree_map_with_path(
        lambda path, w: 0 * w if "memory_scale" in jax.tree_util.keystr(path) else w,
        model,
    )
    assert_values_close(exact(without, ids), exact(plain, ids))
    assert as_latent_memory(plain.stack) is None
    assert as_latent_memory(without.stack) is without.stack


def test_a_memory_of_keys_has_no_place_in_a_pattern():
    stack = SWITCHES["rat"].stack
    with pytest.raises(ValueError, match="RatConfig: memory must enter the residual"):
        dataclasses.replace(stack, memory=MemoryConfig(sources=(1,)))
    with pytest.raises(ValueError, match=r"memory.sources must be layers in 1..2"):
        with_memory(rat(), sources=(3,))


def test_parts_of_a_row_are_refused_by_name(model):
    config = model.config
    reason = Interleaved(subsets=2).refuses(config)
    assert reason is not None and "set objective.subsets 1" in reason
    assert Interleaved(subsets=1).refuses(config) is None
    assert Chunked(chunk=4).refuses(config) is None
    x = jnp.zeros((B, T, 8))
    with pytest.raises(ValueError, match="use one subset"):
        model.stack.refine(x, Tokens(draw_ids(9)), slice(0, None, 2), x)


def test_a_loop_and_a_cut_row_are_refused(model):
    with pytest.raises(ValueError, match="leave out the memory of the RatConfig"):
        RelaxedRecursiveTransformerConfig(transformer=model.config.stack, loops=2)
    mesh = jax.sharding.AbstractMesh(
        (1, 1, 2, 1, 1), ("data", "fsdp", "sequence", "tensor", "stage")
    )
    assert "leave out model.stack.memory" in model.stack.refuses(mesh, 16)


@pytest.mark.parametrize(
    "change", [{"entry_layers": 1}, {"replace_layers": 1}, {"projection": "layerwise"}]
)
def test_what_concerns_keys_and_values_is_refused(change):
    stack = presets.stack(presets.rat(width=8, heads=2, chunk=4), layers=2, width=8)
    with pytest.raises(ValueError, match="memory enters every layer's input: leave"):
        presets.with_memory(stack, **change)


def test_the_preset_reads_lrts_source_layer():
    stack = presets.stack(presets.rat(width=8, heads=2, chunk=4), layers=20, width=8)
    memory = presets.with_memory(stack).memory
    assert memory is not None and memory.sources == (12,) and not memory.gated
