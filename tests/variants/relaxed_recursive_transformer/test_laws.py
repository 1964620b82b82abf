"""The laws of every stack, and what sharing a block must and must not change."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.layers.position import LearnedPositions
from recurjax.sharding import MeshConfig, batch_sharding, make_mesh, shardings
from recurjax.surgery.fewer_layers import truncated
from recurjax.surgery.named_parameters import parameters, with_parameters
from recurjax.surgery.relaxed_recursive import to_transformer
from recurjax.types import Tokens
from recurjax.variants.relaxed_recursive_transformer.block import depths_of
from tests.compiling import QUICK_COMPILE
from tests.laws import B, StackLaws, T, draw_ids, run
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.relaxed_recursive_transformer.switches import (
    LLAMA,
    NEOX,
    RARE,
    SLOW,
    SWITCHES,
    VOCABULARY,
    build,
    small,
)

quick = partial(jax.jit, compiler_options=QUICK_COMPILE)
OWN = [name for name, model in SWITCHES.items() if model.stack.loop_cache == "own"]


class TestLaws(StackLaws):
    models = SWITCHES
    build = staticmethod(build)
    slow, rare = SLOW, RARE
    first = "cycle, untied, rank 3, rings"

    def documents(self, config):
        position = config.stack.transformer.attention.position
        return 0 if isinstance(position, LearnedPositions) else 1


@pytest.fixture(scope="module")
def ids():
    return draw_ids(VOCABULARY)


@quick
def training_logits(model, ids):
    return model(Tokens(ids), model.init_cache(len(ids), 0))[0]


@quick
@jax.grad
def gradients(model, ids):
    logits, _ = model(Tokens(ids), model.init_cache(len(ids), 0))
    return jnp.sum(logits[:, ::2] ** 2)


@pytest.mark.parametrize("name", OWN)
def test_a_recursive_model_equals_its_layers_written_out(name, ids):
    model = build(SWITCHES[name])
    merged = to_transformer(model)
    assert merged.config.stack == model.config.stack.transformer
    assert_values_close(training_logits(model, ids), training_logits(merged, ids))


@pytest.mark.parametrize("sharing", ["cycle", "sequence", "cycle_rev"])
def test_gradients_of_a_shared_layer_are_the_sum_of_its_uses(sharing, ids):
    model = build(small(sharing=sharing, loops=3, layers=6, **LLAMA))
    of_shared = parameters(gradients(model, ids))
    of_layers = parameters(gradients(to_transformer(model), ids))
    depths = depths_of(6, 3, sharing)
    summed = {
        name: np.stack([leaf[depths[:, k]].sum(0) for k in range(2)])
        if name.startswith("stack.blocks.")
        else leaf
        for name, leaf in of_layers.items()
    }
    assert_gradients_close(of_shared, summed)


@pytest.mark.parametrize("base", [LLAMA, NEOX], ids=["llama", "neox"])
def test_one_loop_is_the_transformer_bit_for_bit(base, ids):
    config = small(loops=1, **base)
    model = build(config)
    plain = dataclasses.replace(config, stack=config.stack.transformer)
    plain = with_parameters(plain, parameters(model))
    for compute in (training_logits, gradients):
        ours, theirs = compute(model, ids), compute(plain, ids)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(a, b)
    for length in (T, 1):
        results = [
            run(item, ids[:, :length], item.init_cache(B, T)) for item in (model, plain)
        ]
        np.testing.assert_array_equal(results[0][0], results[1][0])


def test_a_fresh_model_of_any_rank_is_the_one_without_additions(ids):
    model = build(small(rank=3))
    fresh = {
        name: np.zeros_like(leaf) if name.endswith("w_expand") else leaf
        for name, leaf in parameters(model).items()
    }
    plain = build(small())
    shared = {n: leaf for n, leaf in fresh.items() if "adapters" not in n}
    got = training_logits(with_parameters(model.config, fresh), ids)
    want = training_logits(with_parameters(plain.config, shared), ids)
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_eight_devices_compute_what_one_does(ids):
    model = build(small(rank=2, tie_norms=False, **LLAMA))
    rows = np.concatenate([ids, ids[::-1]])
    want = gradients(model, rows)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        spread = jax.device_put(model, shardings(model, mesh))
        reduce = spread.stack.adapters[0].down.w_reduce[...]
        assert reduce.addressable_shards[0].data.size * 4 == reduce.size
        got = gradients(spread, jax.device_put(rows, batch_sharding(mesh)))
    assert_gradients_close(parameters(got), parameters(want))


@pytest.mark.parametrize("loop_cache", ["own", "first"])
def test_states_after_each_loop_are_those_of_the_model_cut_there(loop_cache, ids):
    config = small(loops=3, layers=6, rank=2, tie_norms=False, loop_cache=loop_cache)
    model = build(config)

    @quick
    def states(model):
        cache = model.init_cache(B, 0)
        after, _ = model.stack.states(model.embed(ids), cache, Tokens(ids))
        return jax.vmap(lambda x: model.logits(model.final_norm(x)))(after)

    after = states(model)
    assert after.shape[0] == 3
    for loops in (1, 2, 3):
        assert_values_close(
            after[loops - 1], training_logits(truncated(model, loops), ids)
        )


def test_loops_called_one_by_one_are_the_call(ids):
    model = build(small(loops=3, layers=6, rank=2, windows=(3, None), **LLAMA))
    stack, tokens = model.stack, Tokens(jnp.asarray(ids[:, :5]))
    x, cache = model.embed(tokens.ids), model.init_cache(B, T)
    want, wanted = quick(stack)(x, cache, tokens)
    loop = quick(stack.loop)
    x = stack.enter(x, cache)
    for b in range(3):
        x, cache = loop(x, jnp.int32(b), cache, tokens)
    cache = stack.advance(cache, tokens)
    assert_values_close(x, want)
    for got, group in zip(cache.groups, wanted.groups, strict=True):
        assert_values_close(got.keys, group.keys)
        assert_values_close(got.values, group.values)
    np.testing.assert_array_equal(cache.position, wanted.position)


def test_loops_that_read_the_first_ones_keys_keep_no_others():
    own, first = (
        build(small(loop_cache=kind, windows=(3, None))).init_cache(B, T)
        for kind in ("own", "first")
    )
    assert [group.keys.shape[0] for group in own.groups] == [2, 2]
    assert [group.keys.shape[0] for group in first.groups] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loops": 3}, "divide the 4 layers"),
        (
            {"rank": -1},
            r"RelaxedRecursiveTransformerConfig\.rank: must be >= 0, got -1",
        ),
        ({"windows": (3, None), "sharing": "sequence"}, "several windows"),
        ({"windows": (3, None), "loops": 4}, "every loop has the same ones"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(changes, reason):
    with pytest.raises(ValueError, match=reason):
        small(**changes)


def test_loops_cannot_be_left_out_where_they_do_not_stand_alone():
    with pytest.raises(UserError, match="sharing 'cycle'"):
        truncated(build(small(sharing="sequence")), 1)
    with pytest.raises(UserError, match="residual_scale"):
        truncated(build(small(**LLAMA)), 1)
    with pytest.raises(UserError, match="1..2"):
        truncated(build(small()), 3)
    with pytest.raises(UserError, match="no keys and values"):
        to_transformer(build(small(loop_cache="first")))


def test_flops_count_the_additions_and_leave_out_what_is_not_projected():
    base = small(loops=1).stack
    assert base.flops_per_token(T) == base.transformer.flops_per_token(T)
    # Width 8, 4 heads of 4: q, k, v are 8 to 16, out 16 to 8; the MLP 8 to 12 to 8.
    sides = 3 * (8 + 16) + (16 + 8) + (8 + 12) + (12 + 8)
    ranked = small(rank=2).stack.flops_per_token(T)
    assert ranked == base.flops_per_token(T) + 6 * 4 * 2 * sides
    first = small(loop_cache="first").stack.flops_per_token(T)
    assert first == base.flops_per_token(T) - 6 * 2 * (8 * 16) * 2
