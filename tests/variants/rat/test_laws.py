"""The laws of every stack for RAT's switches; and RAT(C = T) is the RNN."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.types import Tokens
from recurjax.variants.rat import ReversedRatMixerConfig, RnnMixerConfig
from tests.laws import B, StackLaws, T, draw_ids, in_pieces, quick, run
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.rat.switches import (
    HEADS,
    SWITCHES,
    VOCABULARY,
    build,
    rat,
    small,
)


class TestLaws(StackLaws):
    models = SWITCHES
    build = staticmethod(build)
    slow = frozenset({"rat_beside_mamba", "averaged_memories_of_mamba_and_rt"})
    rare = frozenset(
        {"no_positions_chunk_of_one", "attention_beside_mamba", "rat_beside_rt"}
    )
    first = "rat"

    def documents(self, config):
        """Chunks, and blocks of RT's layer, are counted from the row's start."""
        if config.stack.memory is not None:
            return None
        places = config.stack.pattern
        sizes = (getattr(p, "chunk", getattr(p, "block", 1)) for p in places)
        return math.lcm(*sizes)


@pytest.fixture(scope="module")
def ids():
    return draw_ids(VOCABULARY)


@pytest.mark.parametrize("chunk", [T, pytest.param(2 * T, marks=pytest.mark.slow)])
def test_rat_of_one_chunk_is_the_rnn(ids, chunk):
    """Logits and gradients; q and k then get none."""
    recurrent = RnnMixerConfig(heads=HEADS, head_width=4, gate_horizon=T)
    one, rnn = build(small(rat(chunk=chunk))), build(small(recurrent))
    leaves = jax.tree_util.tree_leaves_with_path(one)
    shared = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    rnn = jax.tree_util.tree_map_with_path(
        lambda path, _: shared[jax.tree_util.keystr(path)], rnn
    )

    @quick
    @partial(jax.value_and_grad, has_aux=True)
    def both(model):
        logits, _ = model(Tokens(jnp.asarray(ids)), model.init_cache(B, 0))
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
@pytest.mark.parametrize("pieces", [(1,) * T, (5, 1, 7)])
def test_a_text_inside_its_first_chunk_is_read_in_any_pieces(ids, pieces):
    """The authors' generation fails there; no chunk's end exists yet."""
    model = build(small(rat(chunk=T + 3)))
    whole, _ = run(model, ids, model.init_cache(B, 0))
    read, cache = in_pieces(model, ids, pieces)
    assert not np.any(cache.groups[0].keys)
    assert_values_close(read, whole)


def test_states_stay_float32_in_a_bfloat16_model(ids):
    model = build(dataclasses.replace(SWITCHES["rat"], dtype="bfloat16"))
    cache = model.init_cache(B, T)
    _, after = jax.eval_shape(lambda: model(Tokens(jnp.asarray(ids)), cache))
    for group in (cache.groups[0], after.groups[0]):
        assert group.keys.dtype == jnp.bfloat16
        assert group.k_state.dtype == jnp.float32


def test_a_prompt_longer_than_the_cache_is_an_error(ids):
    model = build(SWITCHES["rat"])
    with pytest.raises(ValueError, match="13 tokens in one call exceed the cache's"):
        run(model, ids, model.init_cache(B, 8))


def reversed_rat(chunk):
    mixer = ReversedRatMixerConfig(
        heads=HEADS, head_width=4, chunk=chunk, groups=2, gate_horizon=4, output_rank=3
    )
    return build(small(mixer, layers=1))


def test_the_reversed_design_of_single_tokens_reads_prompts(ids):
    """A chunk of one token is no decode step of one token."""
    model = reversed_rat(chunk=1)
    whole, _ = run(model, ids, model.init_cache(B, 0))
    read, _ = in_pieces(model, ids, (5, 1, T - 6))
    assert_values_close(read, whole)


def test_the_reversed_design_takes_documents_within_one_chunk(ids):
    model, ids = reversed_rat(chunk=4), ids[:, :3]
    tokens = Tokens(jnp.asarray(ids), jnp.asarray([[0, 1, 1]] * B))
    packed, _ = model(tokens, model.init_cache(B, 0))
    alone, _ = run(model, ids[:, 1:], model.init_cache(B, 0))
    # Attention alone tells no places apart but by their distance; there is no state.
    assert_values_close(packed[:, 1:], alone)
