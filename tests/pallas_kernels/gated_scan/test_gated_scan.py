"""The gated scan: its backends and its two ways to cut, against the definition."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_scan import (
    BlockSizes,
    GateLogits,
    api,
    gated_scan,
    mosaic_tpu,
    xla,
)
from pallas_kernels.gated_scan.call import find_resets
from pallas_kernels.gated_scan.reference import gated_scan_reference
from tests.compiling import QUICK_COMPILE, equations
from tests.pallas_kernels.gated_scan.scan_cases import Case
from tests.pallas_kernels.laws import Call, OpLaws, OracleCase
from tests.tolerances import assert_gradients_close, assert_values_close

B, D, NARROW = 2, 4, 2
CHUNK = 4
MOSAIC = BlockSizes(stretch=2)
MOSAIC_CHUNKS = BlockSizes(stretch=4)


def inputs(length, dtype="float32", *, lengths=False, starts=False):
    draw = np.random.default_rng(length)
    gate = jax.nn.sigmoid(jnp.asarray(draw.normal(size=(B, length, D)))).astype(dtype)
    values = tuple(
        jnp.asarray(draw.normal(size=(B, length, width)), dtype)
        for width in (D, NARROW)
    )
    wide = jnp.promote_types(dtype, jnp.float32)
    initial = tuple(jnp.asarray(draw.normal(size=(B, D)), wide) for _ in values)
    options = {
        "lengths": jnp.asarray([length // 2, 0]) if lengths else None,
        "starts": jnp.asarray(draw.random(size=(B, length)) < 0.3) if starts else None,
    }
    return (gate, values, initial), options


def both_passes(scan, arrays, **options):
    """Returns outputs and gradients of a fixed random sum of all of them."""

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    @partial(jax.value_and_grad, has_aux=True)
    def run(arrays):
        gate, values, initial = arrays
        states, finals = scan(gate, values, initial=initial, **options)
        outputs = (tuple(states), tuple(finals))
        draw = np.random.default_rng(0)
        weighted = [
            jnp.sum(out * draw.normal(size=out.shape))
            for out in jax.tree.leaves(outputs)
        ]
        return sum(weighted), outputs

    (_, outputs), gradients = run(arrays)
    return outputs, gradients


class TestLaws(OpLaws):
    op = api.OP
    function = staticmethod(gated_scan)
    reference = staticmethod(gated_scan_reference)
    backends = {
        "xla": (xla, {}),
        "mosaic_tpu": (mosaic_tpu, {"interpret": True, "blocks": MOSAIC}),
        "mosaic_tpu chunks": (mosaic_tpu, {"interpret": True, "blocks": MOSAIC_CHUNKS}),
    }
    timed = ("gate", "values")
    rowed = ("gate", "values", "initial")
    oracle_cases = [
        # One, prime, a multiple of the chunk, one more.
        *(OracleCase("xla", T, {"starts": True}) for T in (1, 7, 12, 13)),
        *(OracleCase("xla", T, {"starts": True, "chunk": 4}) for T in (1, 7, 12, 13)),
        OracleCase("xla", 13, {"lengths": True}),
        OracleCase("xla", 13, {"lengths": True, "chunk": 4}),
        OracleCase("xla", 13, dtype="bfloat16"),
        OracleCase("xla", 13, {"logits": True, "starts": True, "chunk": 4}),
        OracleCase("xla", 7, {"logits": True, "lengths": True}, "bfloat16"),
        OracleCase(
            "mosaic_tpu chunks", 37, {"chunk": 4, "lengths": True, "widths": (128,)}
        ),
        OracleCase("mosaic_tpu chunks", 37, {"chunk": 4, "widths": (256, 128)}).sweep(),
        OracleCase("mosaic_tpu chunks", 1, {"chunk": 4}).sweep(),
        OracleCase("mosaic_tpu chunks", 64, {"chunk": 4, "starts": True}).sweep(),
        OracleCase("mosaic_tpu chunks", 33, {"chunk": 4}, "bfloat16").slow(),
        OracleCase(
            "mosaic_tpu", 37, {"starts": True, "widths": (128,), "logits": True}
        ),
        OracleCase("mosaic_tpu", 37, {"starts": True, "widths": (128,)}).sweep(),
        OracleCase("mosaic_tpu", 37, {"chunk": 5, "logits": True}).slow(),
        OracleCase("mosaic_tpu", 33, {"logits": True}, "bfloat16").sweep(),
        OracleCase(
            "mosaic_tpu chunks", 37, {"chunk": 4, "logits": True, "starts": True}
        ).sweep(),
        OracleCase("mosaic_tpu", 1).slow(),
        OracleCase("mosaic_tpu", 32, {"chunk": 5, "lengths": True}).sweep(),
        OracleCase("mosaic_tpu", 33, {"widths": (128,)}, "bfloat16").sweep(),
    ]

    def call(self, length, *, dtype="float32", chunk=None, **switches):
        case = Case(positions=length, dtype=dtype, chunk=chunk, **switches)
        gate, values, initial, starts, lengths, _ = case.inputs()
        arrays = {"gate": gate, "values": values, "initial": initial}
        return Call(arrays, {"starts": starts, "lengths": lengths, "chunk": chunk})

    def in_two(self, call, at, backend):
        def part(positions, initial):
            cut = lambda x: x[:, positions]  # noqa: E731
            timed = {k: jax.tree.map(cut, call.arrays[k]) for k in self.timed}
            arrays = timed | {"initial": initial}
            (out,) = self.outputs(backend, call._replace(arrays=arrays))
            return out

        first = part(slice(at), call.arrays["initial"])
        second = part(slice(at, None), first.finals)
        joined = [
            jnp.concatenate(both, axis=1)
            for both in zip(first.states, second.states, strict=True)
        ]
        return api.GatedScanOutputs(tuple(joined), second.finals)

    def test_chunks_restart_whatever_came_before(self):
        call = self.call(13, chunk=4)
        (before,) = self.outputs("xla", call)
        initial = jax.tree.map(lambda h: h + 1, call.arrays["initial"])
        arrays = call.arrays | {"initial": initial}
        (after,) = self.outputs("xla", call._replace(arrays=arrays))
        np.testing.assert_array_equal(after.states[0][:, 4:], before.states[0][:, 4:])


def test_a_row_of_no_positions_ends_as_it_began():
    arrays, options = inputs(13, lengths=True)
    _, finals = gated_scan(arrays[0], arrays[1], initial=arrays[2], **options)
    np.testing.assert_array_equal(finals[0][1], arrays[2][0][1])


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("name", ["chunked", "blocked"])
def test_the_cuts_for_accelerators_give_the_same(name, starts):
    """What a CPU's own lowering leaves out: parallel chunks, and blocks."""
    (gate, values, initial), options = inputs(13, starts=starts)
    starts = options["starts"]
    draw = np.random.default_rng(1)
    d_states = tuple(jnp.asarray(draw.normal(size=(B, 13, D)), "f") for _ in values)
    d_finals = tuple(jnp.asarray(draw.normal(size=(B, D)), "f") for _ in values)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def fast(gate, values, initial):
        forward = getattr(xla, f"{name}_forward")
        backward = getattr(xla, f"{name}_backward")
        out = forward(gate, values, initial, starts, size=CHUNK)
        gradients = backward(
            *(gate, values, initial, starts, out[0], d_states, d_finals),
            size=CHUNK,
        )
        return out, gradients

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def slow(gate, values, initial):
        chunk = CHUNK if name == "chunked" else None

        def run(gate, values, initial):
            return gated_scan_reference(
                gate, values, initial=initial, starts=starts, chunk=chunk
            )

        out, pull = jax.vjp(run, gate, values, initial)
        return out, pull((d_states, d_finals))

    got, want = fast(gate, values, initial), slow(gate, values, initial)
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])


def test_bfloat16_values_recur_in_float32():
    arrays, _ = inputs(13, "bfloat16")
    (states, finals), gradients = both_passes(gated_scan, arrays, chunk=None)
    assert states[0].dtype == jnp.bfloat16 and finals[0].dtype == jnp.float32
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    want = both_passes(gated_scan_reference, wide, chunk=None)
    assert_values_close(finals, want[0][1])  # no rounding on the way
    assert_values_close(states, want[0][0], "bfloat16")
    assert_gradients_close(gradients, want[1], "bfloat16")


def test_gradients_are_finite_differences():
    with jax.enable_x64(True):
        arrays, options = inputs(5, "float64", starts=True)
        gate, values, initial = arrays

        @jax.jit
        def total(gate, values, initial):
            out = gated_scan(gate, values, initial=initial, chunk=2, **options)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out))

        jax.test_util.check_grads(total, arrays, order=1, modes=["rev"], rtol=1e-6)


def test_a_gate_of_one_carries_the_state_to_the_bit():
    (gate, values, initial), _ = inputs(7)
    (states, _), finals = gated_scan(jnp.ones_like(gate), values, initial=initial)
    np.testing.assert_array_equal(states[:, -1], initial[0])
    np.testing.assert_array_equal(finals[0], initial[0])


def test_a_period_resets_where_chunks_begin_but_not_the_state_that_came_in():
    want = [False, False, False, True, False, False, True]
    np.testing.assert_array_equal(find_resets(7, None, 3), [want])
    starts = jnp.zeros((2, 7), bool).at[1, 1].set(True)
    both = np.asarray([want, want])
    both[1, 1] = True
    np.testing.assert_array_equal(find_resets(7, starts, 3), both)
    assert find_resets(7, None, None) is None


def test_logits_are_read_in_their_dtype_and_the_bias_in_its_own():
    """The sum and the sigmoid are float32: bfloat16 would round both."""
    (gate, values, _), _ = inputs(7)
    logits = jnp.log(gate / (1 - gate)).astype(jnp.bfloat16)
    bias = jnp.linspace(3.0, 9.0, D)
    (states, _), _ = gated_scan(GateLogits(logits, bias), values)
    wide = jax.nn.sigmoid(logits.astype(jnp.float32) + bias)
    (want, _), _ = gated_scan(wide, values)
    assert_values_close(states, want)
    rounded = jax.nn.sigmoid(logits + bias.astype(jnp.bfloat16)).astype(jnp.float32)
    (coarse, _), _ = gated_scan(rounded, values)
    assert jnp.abs(coarse - want).max() > 1e-3
    (without, _), _ = gated_scan(GateLogits(logits), values)
    (plain, _), _ = gated_scan(jax.nn.sigmoid(logits.astype(jnp.float32)), values)
    assert_values_close(without, plain)


def test_a_logit_of_infinity_carries_the_state_to_the_bit_and_has_no_gradient():
    (gate, values, initial), _ = inputs(7)

    def last(logits, bias):
        gate = GateLogits(logits, bias)
        states, finals = gated_scan(gate, values, initial=initial)
        return finals[0].sum(), finals[0]

    arrays = (jnp.full_like(gate, jnp.inf), jnp.ones(D))
    gradients, final = jax.grad(last, argnums=(0, 1), has_aux=True)(*arrays)
    np.testing.assert_array_equal(final, initial[0])
    for d in gradients:
        np.testing.assert_array_equal(d, np.zeros_like(d))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"gate": GateLogits(jnp.zeros((B, 7, D)), jnp.zeros(D + 1))},
            r"needs bias of shape \(4,\), got \(5,\)",
        ),
        ({"chunk": 0}, "needs chunk of at least 1, got 0"),
        ({"values": ()}, "at least one stream"),
        ({"gate": jnp.zeros((B, D))}, r"gate \[B, T, D\] of 1 or more, got \(2, 4\)"),
        ({"gate": jnp.zeros((0, 7, D))}, r"of 1 or more, got \(0, 7, 4\)"),
        ({"gate": jnp.zeros((B, 7, D), int)}, "needs floating gate, got int32"),
        ({"starts": jnp.zeros((B, 7), int)}, "needs bool starts, got int32"),
        ({"lengths": jnp.zeros(B)}, "needs integer lengths, got float32"),
        ({"values": (jnp.zeros((B, 7, 3)),)}, "a width that divides 4"),
        ({"initial": (jnp.zeros((B, D)),)}, "needs 2 initial states"),
        ({"starts": jnp.zeros((B, 6), bool)}, "needs starts of shape"),
        ({"lengths": jnp.zeros(3, int)}, "needs lengths of shape"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(change, message):
    (gate, values, initial), _ = inputs(7)
    arguments = {"gate": gate, "values": values, "initial": initial} | change
    unchecked = getattr(gated_scan, "__wrapped__", gated_scan)
    with pytest.raises(ValueError, match=message):
        unchecked(**arguments)


def test_the_program_grows_with_the_logarithm_of_the_sequence_at_most():
    """Time to compile follows the program's size; chunks of one length do not grow."""

    def size(chunk, length):
        shape = jax.ShapeDtypeStruct((1, length, 64), jnp.float32)
        total = lambda g, v: jnp.sum(  # noqa: E731
            gated_scan(g, (v,), chunk=chunk).states[0]
        )
        program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(shape, shape)
        return equations(program.jaxpr)

    assert size(16, 2048) == size(16, 32768)
    short, long, longest = (size(None, 2048 * 16**n) for n in range(3))
    assert longest - long == long - short


def test_lengths_beyond_the_row_are_the_row_s_ends():
    (gate, values, initial), _ = inputs(7)

    def total(values, lengths):
        result = gated_scan(gate, values, initial=initial, lengths=jnp.asarray(lengths))
        return sum(jnp.sum(jnp.cos(h)) for h in result.finals)

    both = jax.jit(jax.value_and_grad(total), static_argnums=1)
    chex.assert_trees_all_equal(both(values, (9, -1)), both(values, (7, 0)))
