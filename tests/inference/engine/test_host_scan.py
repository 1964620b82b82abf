"""Programs whose scans over weights the host runs: the same results, no copies."""

from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.inference.engine.host_scan import (
    HostScan,
    _scan_counts,
    scans_weights,
)
from recurjax.parameters import parameter_name, rule_of
from tests.inference.engine.models import VARIANTS, build_engine, build_model
from tests.marks import slow_except

L, D = 3, 16


def steps(weights, x, stays, limit):
    """All that a tape can meet: loops in loops, what passes through, what is twice."""

    def layer(carry, scanned):
        x, kept, number = carry
        w, offset = scanned
        x = jnp.tanh(x @ w.reshape(D, D) + offset)
        return (x, kept, number + 1), x[0, :2]

    def step(carry):
        n, x, kept, outs = carry
        offsets = jnp.arange(L, dtype=jnp.float32)
        layers = (weights["w"], offsets)
        (x, kept, _), new = jax.lax.scan(layer, (x, kept, n), layers, reverse=True)

        def token(x, offset):
            inner = jax.lax.scan(layer, (x + offset, kept, n), layers)
            return inner[0][0], inner[1].sum()

        x, sums = jax.checkpoint(partial(jax.lax.scan, token))(x, offsets)
        x, none = jax.lax.scan(token, x, offsets[:0])  # no turn at all
        return n + 1, x, kept, outs + new + sums.sum() + none.sum()

    outs = jnp.zeros((L, 2))
    start = (jnp.int32(0), x, stays, outs)
    goes_on = lambda carry: carry[0] < limit  # noqa: E731
    n, x, kept, outs = jax.lax.while_loop(goes_on, step, start)
    return {"x": x, "again": x, "kept": kept, "stays": stays, "outs": outs}, n


def test_the_host_s_loops_are_the_program_s():
    draw = np.random.default_rng(0)
    weights = {"w": jnp.asarray(draw.normal(size=(L, D * D)) / 4, jnp.float32)}
    x, stays = draw.normal(size=(2, 2, D)).astype(np.float32)
    jitted = jax.jit(steps, donate_argnums=1)
    arguments = (weights, jnp.array(x), jnp.array(stays), np.int32(2))
    traced = jitted.trace(*arguments)
    assert scans_weights(traced, arguments, known=1)
    assert not scans_weights(traced, arguments, known=0)
    ours = HostScan(traced, arguments, known=1, donate=(1,))
    theirs = jitted.lower(*arguments).compile()
    for limit in (0, 1, 3):
        calls = [
            run(weights, jnp.array(x), jnp.array(stays), np.int32(limit))
            for run in (ours, theirs)
        ]
        chex.assert_trees_all_close(*calls, rtol=1e-5, atol=1e-5)
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(calls[0])]
        assert len({*pointers}) == len(pointers)


@pytest.mark.parametrize(
    "name", slow_except(("transformer", "recurformer", "rnn"), VARIANTS)
)
def test_no_program_of_a_decode_step_takes_a_stack_of_weights(name):
    """So no weight is copied out of its stack: each program has one layer's alone."""
    engine = build_engine(build_model(name))
    decode = engine._programs._compiled["decode"]
    programs = decode.programs if isinstance(decode, HostScan) else [decode]
    # The layers of a RecurFormer are no stack.
    assert isinstance(decode, HostScan) == (name != "recurformer")
    stacks = {
        f"f32[{','.join(map(str, leaf.shape))}]"
        for path, leaf in jax.tree_util.tree_leaves_with_path(engine._programs._model)
        if "blocks" in parameter_name(path) and rule_of(parameter_name(path)).is_weight
    }
    assert stacks or name == "recurformer"
    for program in programs:
        text = program.as_text() or ""
        assert not [shape for shape in stacks if shape in text]


def test_a_layer_s_weights_are_a_view_of_the_stack():
    stack = {"w": jnp.ones((L, D * D))}
    arguments = (stack, jnp.ones((1, D)), jnp.ones((1, D)), np.int32(1))
    program = HostScan(jax.jit(steps).trace(*arguments), arguments, known=1, donate=())
    begin = stack["w"].unsafe_buffer_pointer()
    places = [begin + n * stack["w"].nbytes // L for n in range(L)]
    found = {
        x.unsafe_buffer_pointer()
        for step in program._tape._loops[0]._steps
        for x in step.arguments
        if isinstance(x, jax.Array) and x.size == D * D
    }
    assert found == {*places}


def test_the_operands_of_a_scan_are_counted_in_the_forms_of_jax_0_10_and_0_12():
    groups = SimpleNamespace(unpack=lambda: ((None, None), (None,), ()))
    counts = {"num_consts": 2, "num_carry": 1}
    assert _scan_counts(counts) == _scan_counts({"ft_in": groups}) == (2, 1)
