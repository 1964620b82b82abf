"""The gated scan: its backends and its two ways to cut, against the definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_scan import gated_scan, xla
from pallas_kernels.gated_scan.reference import gated_scan_reference
from tests.compiling import QUICK_COMPILE, equations
from tests.tolerances import assert_gradients_close, assert_values_close

B, D, NARROW = 2, 4, 2
LENGTHS = [1, 7, 12, 13]  # one, prime, a multiple of the chunk, one more
CHUNK = 4


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


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk", [None, CHUNK])
def test_values_and_gradients_are_those_of_the_definition(length, chunk):
    arrays, options = inputs(length, starts=True)
    options["chunk"] = chunk
    got = both_passes(gated_scan, arrays, **options)
    want = both_passes(gated_scan_reference, arrays, **options)
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])


@pytest.mark.parametrize("chunk", [None, CHUNK])
def test_ragged_rows_end_at_their_own_lengths(chunk):
    arrays, options = inputs(13, lengths=True)
    got = both_passes(gated_scan, arrays, chunk=chunk, **options)
    want = both_passes(gated_scan_reference, arrays, chunk=chunk, **options)
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])
    np.testing.assert_array_equal(got[0][1][0][1], arrays[2][0][1])  # a row of none


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("name", ["chunked", "blocked"])
def test_the_cuts_for_accelerators_give_the_same(name, starts):
    """What a CPU's own lowering leaves out: parallel chunks, and blocks."""
    (gate, values, initial), options = inputs(13, starts=starts)
    starts = options["starts"]
    draw = np.random.default_rng(1)
    d_states = tuple(draw.normal(size=(B, 13, D)).astype("f") for _ in values)
    d_finals = tuple(draw.normal(size=(B, D)).astype("f") for _ in values)

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


def test_the_future_does_not_leak_into_the_past():
    (gate, values, _), _ = inputs(13)
    (before, _), _ = gated_scan(gate, values)
    changed = tuple(v.at[:, 8].add(1) for v in values)
    (after, _), _ = gated_scan(gate, changed)
    np.testing.assert_array_equal(after[:, :8], before[:, :8])
    assert np.all(after[:, 8] != before[:, 8])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "wants chunk of at least 1, got 0"),
        ({"values": ()}, "at least one position and one stream"),
        ({"values": (jnp.zeros((B, 7, 3)),)}, "a width that divides 4"),
        ({"initial": (jnp.zeros((B, D)),)}, "wants 2 initial states"),
        ({"starts": jnp.zeros((B, 6), bool)}, "wants starts of shape"),
        ({"lengths": jnp.zeros(3, int)}, "wants lengths of shape"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(change, message):
    (gate, values, initial), _ = inputs(7)
    arguments = {"gate": gate, "values": values, "initial": initial} | change
    unchecked = getattr(gated_scan, "__wrapped__", gated_scan)
    with pytest.raises(ValueError, match=message):
        unchecked(**arguments)


def test_an_unknown_backend_is_named():
    (gate, values, _), _ = inputs(1)
    unchecked = getattr(gated_scan, "__wrapped__", gated_scan)
    with pytest.raises(ValueError, match="wants an implementation of"):
        unchecked(gate, values, implementation="cuda")


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
