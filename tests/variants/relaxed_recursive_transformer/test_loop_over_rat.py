"""The loop over RAT's mixers: the stack's laws, its layers written out, exits."""

import dataclasses
import itertools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.exits import EarlyExit, ExitRule, confidence
from recurjax.inference.engine import EngineConfig
from recurjax.inference.engine.strategy import choose_strategy
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.sharding import MeshConfig, batch_sharding, make_mesh, shardings
from recurjax.surgery.fewer_layers import truncated
from recurjax.surgery.named_parameters import parameters, with_parameters
from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE, compiled_programs
from tests.inference.engine.models import (
    LENGTH,
    SIZES,
    build_engine,
    draw_requests,
    finish,
)
from tests.inference.oracle import early_text
from tests.laws import B, StackLaws, T, draw_ids
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.training.compilation import quick_compilation
from tests.variants.relaxed_recursive_transformer.rat_switches import (
    FULL,
    MAMBA,
    RARE,
    RNN,
    RT,
    SLOW,
    SWITCHES,
    VOCABULARY,
    WINDOW,
    build,
    rat,
    small,
)
from tests.variants.relaxed_recursive_transformer.test_laws import (
    gradients,
    training_logits,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
__all__ = ["quick_compilation"]
quick = partial(jax.jit, compiler_options=QUICK_COMPILE)
EARLY = small(
    *(rat.rat(), RNN),
    loops=3,
    rank=2,
    tie_norms=False,
    mlp=MlpConfig(kind="swiglu", width=12, bias=True),
    norm=NormConfig(kind="layer", bias=True),
)
WINDOWS = small(WINDOW, FULL, loops=3, rank=2, tie_norms=False)
MIXED = small(MAMBA, WINDOW, loops=3, rank=2, tie_norms=False)
SURE = 0.2


def deepens(loops: list[int]) -> bool:
    """Whether a token reads states that one which left before it lacks."""
    ran = loops[1:]  # the first new token's loops are the prompt's
    return any(first < then for first, then in itertools.pairwise(ran))


class TestLaws(StackLaws):
    models = SWITCHES
    build = staticmethod(build)
    slow, rare = SLOW, RARE
    first = "rat, untied, rank 3, attention"

    def documents(self, config):
        """Chunks, and blocks of RT's layer, are counted from the row's start."""
        places = config.stack.transformer.pattern
        sizes = (getattr(p, "chunk", getattr(p, "block", 1)) for p in places)
        return math.lcm(*sizes)


@pytest.fixture(scope="module")
def ids():
    return draw_ids(VOCABULARY)


def addition_of(weight: str) -> str:
    """The name of a weight's low-rank addition."""
    for gate in ("forget_gate", "output_gate"):
        if gate in weight:
            part = weight.rpartition(".w_")[2]
            return gate if part == "full" else f"{gate}_{part}"
    return weight.rpartition(".w_")[2]


def written_out(model):
    """Returns the stack of RAT with W + A B of each depth in a layer of its own."""
    stack, leaves = model.config.stack, parameters(model)
    base, P, K = stack.transformer, len(stack.transformer.pattern), stack.block_layers
    layers = {}
    for name, leaf in leaves.items():
        block = re.fullmatch(r"stack\.blocks\.(\d+)\.(.*)", name)
        if block is None:
            if not name.startswith("stack."):
                layers[name] = leaf
            continue
        place, is_matrix = int(block[1]), ".w_" in name
        depths = []
        for depth in range(place, base.layers, P):
            b, repeat = depth // K, depth % K // P
            untied = not is_matrix and not stack.tie_norms
            value = leaf[b, repeat] if untied else leaf[repeat]
            adapter = f"stack.adapters.{place}.{addition_of(block[2])}"
            # A convolution is no linear map.
            if is_matrix and stack.rank and not name.endswith("w_conv"):
                reduce, expand = (
                    leaves[f"{adapter}.w_{side}"][b, repeat]
                    for side in ("reduce", "expand")
                )
                value = value + (reduce @ expand).reshape(value.shape)
            depths.append(value)
        layers[name] = np.stack(depths)
    return with_parameters(dataclasses.replace(model.config, stack=base), layers)


@pytest.mark.parametrize(
    "name",
    [
        "windows, rat, tied",
        "rat, untied, rank 3, attention",
        "rnn, three loops, rank 2",
        pytest.param("mamba, attention, untied, rank 2", marks=pytest.mark.slow),
        pytest.param("rt, rat, untied, rank 2", marks=pytest.mark.slow),
    ],
)
def test_a_looped_stack_equals_its_layers_written_out(name, ids):
    model = build(SWITCHES[name])
    plain = written_out(model)
    assert_values_close(training_logits(model, ids), training_logits(plain, ids))


def test_gradients_of_a_shared_layer_are_the_sum_of_its_uses(ids):
    model = build(small(rat.rat(), RNN, loops=3))
    of_shared = parameters(gradients(model, ids))
    of_layers = parameters(gradients(written_out(model), ids))
    summed = {
        name: leaf.sum(0, keepdims=True) if name.startswith("stack.blocks.") else leaf
        for name, leaf in of_layers.items()
    }
    assert_gradients_close(of_shared, summed)


def test_one_loop_is_the_stack_itself_bit_for_bit(ids):
    model = build(small(rat.rat(), RNN, loops=1))
    plain = dataclasses.replace(model.config, stack=model.config.stack.transformer)
    plain = with_parameters(plain, parameters(model))
    for compute in (training_logits, gradients):
        ours, theirs = compute(model, ids), compute(plain, ids)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat", [pytest.param("dots", marks=pytest.mark.sweep), "block"]
)
def test_recomputed_gradients_are_the_same(remat, ids):
    model = build(EARLY)
    stack = model.config.stack
    base = dataclasses.replace(stack.transformer, remat=remat)
    stack = dataclasses.replace(stack, transformer=base)
    config = dataclasses.replace(model.config, stack=stack)
    got = gradients(with_parameters(config, parameters(model)), ids)
    assert_gradients_close(parameters(got), parameters(gradients(model, ids)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        pytest.param({"data": 4, "sequence": 2}, marks=pytest.mark.sweep),
    ],
)
def test_eight_devices_compute_what_one_does(axes):
    model = build(EARLY)
    rows = np.concatenate([draw_ids(VOCABULARY, 16)] * 2)
    want = gradients(model, rows)
    mesh = make_mesh(MeshConfig(**axes))
    assert model.stack.refuses(mesh, rows.shape[1]) is None
    with jax.set_mesh(mesh):
        spread = jax.device_put(model, shardings(model, mesh))
        got = gradients(spread, jax.device_put(rows, batch_sharding(mesh)))
    assert_gradients_close(parameters(got), parameters(want))


def test_states_after_each_loop_are_those_of_the_model_cut_there(ids):
    model = build(EARLY)

    @quick
    def states(model):
        cache = model.init_cache(B, 0)
        after, _ = model.stack.states(model.embed(ids), cache, Tokens(ids))
        return jax.vmap(lambda x: model.logits(model.final_norm(x)))(after)

    after = states(model)
    for loops in (1, 2, 3):
        assert_values_close(
            after[loops - 1], training_logits(truncated(model, loops), ids)
        )


def test_loops_called_one_by_one_are_the_call(ids):
    model = build(EARLY)
    stack, tokens = model.stack, Tokens(jnp.asarray(ids[:, :5]))
    x, cache = model.embed(tokens.ids), model.init_cache(B, T)
    want, wanted = quick(stack)(x, cache, tokens)
    loop = quick(stack.loop)
    for b in range(3):
        x, cache = loop(x, jnp.int32(b), cache, tokens)
    cache = stack.advance(cache, tokens)
    assert_values_close(x, want)
    for got, kept in zip(jax.tree.leaves(cache), jax.tree.leaves(wanted), strict=True):
        assert_values_close(got, kept)


@pytest.mark.slow
def test_rows_leave_all_at_once_as_texts_do_token_by_token():
    model, (prompt, settings) = build(EARLY), draw_requests(VOCABULARY, 3)[2]
    rule = ExitRule(kind="confidence", threshold=SURE)
    exits = EarlyExit(rule=rule, missing="propagate")
    text = early_text(model, prompt, settings, LENGTH, exits)
    ids = np.array([[*prompt, *text.tokens[:-1]]], np.int32)

    @quick
    def at_once(model, ids):
        def leave(loop, before, after):
            sure = confidence(model.logits(model.final_norm(after))) > SURE
            return sure & (jnp.arange(ids.shape[1]) >= len(prompt))

        x, ran = model.stack.leaving(model.embed(ids), Tokens(ids), leave)
        return model.logits(model.final_norm(x)), ran

    logits, ran = (np.asarray(x)[0, len(prompt) - 1 :] for x in at_once(model, ids))
    assert_values_close(np.stack(text.logits), logits)
    assert text.loops == ran.tolist() and deepens(text.loops)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(EARLY, id="states", marks=pytest.mark.slow),
        pytest.param(WINDOWS, id="windows", marks=pytest.mark.sweep),
        pytest.param(MIXED, id="mamba", marks=pytest.mark.sweep),
        pytest.param(small(RT, RNN, loops=3), id="rt", marks=pytest.mark.sweep),
    ],
)
def test_slots_at_mixed_loops_say_what_one_row_at_a_time_does(config):
    model, count = build(config), 6
    rule = ExitRule(kind="confidence", threshold=SURE)
    sizes = dataclasses.replace(
        SIZES, states_gib=0.0, steps=6, exit=rule, missing="propagate"
    )
    engine = build_engine(model, sizes)
    requests = draw_requests(VOCABULARY, count)
    exits = EarlyExit(rule=rule, missing="propagate")
    expected = [early_text(model, *request, LENGTH, exits) for request in requests]
    assert any(deepens(text.loops) for text in expected)
    with compiled_programs() as compiled:
        for order in (range(count), range(count - 1, -1, -1)):
            together = [engine.submit(*requests[n]) for n in order]
            finish(engine, together)
            for n, request in zip(order, together, strict=True):
                assert request.tokens == expected[n].tokens
                assert request.loops == expected[n].loops
    assert compiled == []


def test_without_exits_an_engine_says_what_it_does_with_a_threshold_of_one():
    model = build(SWITCHES["windows, rat, tied"])
    requests = draw_requests(VOCABULARY, 3)
    never = ExitRule(kind="confidence", threshold=1.0)
    texts = []
    for options in ({}, {"exit": never}):
        sizes = dataclasses.replace(SIZES, states_gib=0.0, **options)
        engine = build_engine(model, sizes)
        texts.append(finish(engine, [engine.submit(*r) for r in requests]))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("pattern", "options", "reason"),
    [
        ((rat.rat(), RNN), {"sharing": "sequence"}, "several mixers"),
        ((rat.rat(), RNN), {"layers": 4, "loops": 4}, "every loop has the same ones"),
        ((rat.rat(),), {"loop_cache": "first"}, "use 'own'"),
    ],
)
def test_what_cannot_be_looped_is_refused_by_name(pattern, options, reason):
    with pytest.raises(ValueError, match=reason):
        small(*pattern, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"missing": "skip"}, "a RatConfig's mixers also have states: use propagate"),
        ({"missing": "share"}, "share is for a model with loop_cache 'first'"),
        ({"missing": "verify"}, "verify takes back .* cannot forget a token"),
        ({"speculate": 4, "exit": None}, "speculate 4 takes .* cannot forget a token"),
    ],
)
def test_exits_that_states_do_not_have_are_refused(options, said):
    rule = ExitRule(kind="cosine", threshold=0.5)
    config = EngineConfig(**{"exit": rule} | options)
    with pytest.raises(UserError, match=said):
        choose_strategy(build(EARLY), config, None)


@pytest.mark.parametrize("own", [{"rank": 2}, {"tie_norms": False}])
def test_rows_of_one_matrix_are_refused_at_different_loops(own):
    config = EngineConfig(exit=ExitRule(kind="cosine", threshold=0.5))
    with pytest.raises(UserError, match="use rank 0 and tie_norms"):
        choose_strategy(build(small(RT, **own)), config, None)


@pytest.mark.parametrize(
    ("axes", "length", "said"),
    [
        ({"data": 4, "stage": 2}, 16, "mesh.stage is for pipelines"),
        ({"data": 4, "sequence": 2}, 12, r"mesh.sequence = 2: .* chunk"),
    ],
)
def test_meshes_that_rat_does_not_have_are_refused(axes, length, said):
    mesh = make_mesh(MeshConfig(**axes))
    reason = build(SWITCHES["rat, cycle_rev"]).stack.refuses(mesh, length)
    assert reason is not None and re.search(said, reason)


def test_flops_count_the_additions_of_every_mixer():
    looped = small(rat.rat(), RNN).stack
    assert looped.flops_per_token(T) == looped.transformer.flops_per_token(T)
    # Width 8. RAT: 4 heads of 4, two of them of queries and keys; the RNN has 12
    # channels and a forget gate of rank 3; the MLP 8 to 12 to 8.
    of_rat = [(8, 8), (8, 8), (8, 16), (16, 8), (8, 16), (8, 16)]
    of_rnn = [(8, 12), (12, 8), (8, 3), (3, 12), (8, 12)]
    maps = of_rat + of_rnn + 2 * [(8, 12), (12, 8)]
    added = sum(min(4, n, m) * (n + m) for n, m in maps)
    ranked = small(rat.rat(), RNN, rank=4).stack.flops_per_token(T)
    assert ranked == looped.flops_per_token(T) + 6 * 2 * added
