"""Chunk attention: the XLA backend against the definition; the log-sum-exp trap."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels.chunk_attention import ChunkEnds, chunk_attention, tiles
from pallas_kernels.chunk_attention.reference import chunk_attention_reference
from tests.compiling import QUICK_COMPILE, equations
from tests.tolerances import assert_gradients_close, assert_values_close

B, H, E = 2, 4, 4
CHUNK = 3
UNCHECKED = getattr(chunk_attention, "__wrapped__", chunk_attention)


def inputs(length, groups=2, ends=None, dtype="float32", *, documents=False):
    draw = np.random.default_rng(length)
    ends = -(-length // CHUNK) if ends is None else ends

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape), dtype)

    arrays = (
        normal(B, length, groups, E),
        normal(B, length, H),
        normal(B, length, H, E),
        normal(B, H, ends, E),
        normal(B, H, ends, E),
    )
    options = {"chunk": CHUNK, "scale": 0.5}
    if documents:
        numbers = np.sort(draw.integers(3, size=(B, length)), axis=1).astype(np.int32)
        numbers = jnp.asarray(numbers)
        options["documents"] = numbers
        options["end_documents"] = numbers[:, CHUNK - 1 :: CHUNK]
    return arrays, options


def both_passes(attention, arrays, *, end_documents=None, **options):
    """Returns o and the gradients of a fixed random sum of it."""

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    @partial(jax.value_and_grad, has_aux=True)
    def run(arrays):
        q, own_logits, own_values, keys, values = arrays
        ends = ChunkEnds(keys, values, end_documents)
        o = attention(q, own_logits, own_values, ends, **options)
        return jnp.sum(o * np.random.default_rng(0).normal(size=o.shape)), o

    (_, o), gradients = run(arrays)
    return o, gradients


def assert_is_the_definition(arrays, options, dtype="float32"):
    got = both_passes(chunk_attention, arrays, **options)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    want = both_passes(chunk_attention_reference, wide, **options)
    assert_values_close(got[0], want[0], dtype)
    assert_gradients_close(got[1], want[1], dtype)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several bands, and several blocks in each."""
    monkeypatch.setattr(tiles, "_BAND_LOGITS", 200)
    monkeypatch.setattr(tiles, "_BLOCK_LOGITS", 150)


@pytest.mark.parametrize("length", [1, 7, 12, 13])
def test_values_and_gradients_are_those_of_the_definition(length):
    assert_is_the_definition(*inputs(length))


@pytest.mark.parametrize("groups", [1, 4])
def test_bands_and_blocks_change_nothing(groups, small_tiles):
    arrays, options = inputs(13, groups)
    cut = tiles.choose_tiles(B, 13, H, 5, causal=True)
    assert cut.bands > 1 and cut.blocks > 1
    assert_is_the_definition(arrays, options)


def test_rows_in_later_chunks_see_cached_ends(small_tiles):
    arrays, options = inputs(7, ends=6)
    options["first"] = jnp.asarray([3, 0])
    assert_is_the_definition(arrays, options)


def test_one_token_of_generation_sees_all_earlier_chunks():
    arrays, options = inputs(1, ends=6)
    options |= {"first": jnp.asarray([5, 2]), "chunk": 1}
    assert_is_the_definition(arrays, options)


def test_documents_do_not_see_each_other(small_tiles):
    assert_is_the_definition(*inputs(12, documents=True))


def test_bfloat16_costs_rounding_only():
    arrays, options = inputs(13, dtype="bfloat16")
    assert_is_the_definition(arrays, options, "bfloat16")


def test_a_position_of_the_first_chunk_is_its_own_value():
    arrays, options = inputs(7, ends=0)
    options["chunk"] = 7
    o, _ = both_passes(chunk_attention, arrays, **options)
    np.testing.assert_array_equal(o, arrays[2])


def test_gradients_are_finite_differences():
    """The trap: a merge through a library's log-sum-exp has a wrong gradient."""
    with jax.enable_x64(True):
        arrays, options = inputs(7, dtype="float64")

        @jax.jit
        def total(q, own_logits, own_values, keys, values):
            ends = ChunkEnds(keys, values)
            o = chunk_attention(q, own_logits, own_values, ends, **options)
            return jnp.sum(jnp.sin(o))

        jax.test_util.check_grads(total, arrays, order=1, modes=["rev"], rtol=1e-6)
        gradients = jax.grad(total, argnums=(0, 1))(*arrays)
        assert all(np.abs(g[:, CHUNK:]).max() > 1e-3 for g in gradients)


def test_the_future_does_not_leak_into_the_past(small_tiles):
    arrays, options = inputs(13)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(arrays):
        q, own_logits, own_values, keys, values = arrays
        ends = ChunkEnds(keys, values)
        return chunk_attention(q, own_logits, own_values, ends, **options)

    before = run(arrays)
    q, own, values, keys, end_values = arrays
    changed = (
        q.at[:, 8].add(1),
        own.at[:, 8].add(1),
        values.at[:, 8].add(1),
        keys.at[:, :, 2].add(1),  # the end of positions 6 to 8
        end_values.at[:, :, 2].add(1),
    )
    after = run(changed)
    np.testing.assert_array_equal(after[:, :8], before[:, :8])
    assert np.all(np.any(np.asarray(after[:, 8:] != before[:, 8:]), axis=(2, 3)))


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((1, 4096, 4, 256), (512, 1, 8)),
        ((1, 4096, 4, 255), (512, 1, 8)),
        ((1, 1024, 4, 64), (1024, 1, 1)),
        ((1, 1, 4, 256), (1, 1, 1)),
    ],
)
def test_cuts_are_those_that_were_measured(shape, cut):
    chosen = tiles.choose_tiles(*shape, causal=True)
    assert (chosen.rows, chosen.blocks, chosen.bands) == cut


def test_logits_of_long_sequences_stay_in_blocks():
    """No array of T x S elements anywhere in the program, at T 32768 and C 16."""
    T, S = 32768, 2048
    arrays = jax.eval_shape(
        lambda: (
            jnp.zeros((1, T, 2, 8)),
            jnp.zeros((1, T, 4)),
            jnp.zeros((1, T, 4, 8)),
            jnp.zeros((1, 4, S, 8)),
            jnp.zeros((1, 4, S, 8)),
        )
    )

    def total(q, own_logits, own_values, keys, values):
        ends = ChunkEnds(keys, values)
        return jnp.sum(
            chunk_attention(q, own_logits, own_values, ends, chunk=16, scale=1.0)
        )

    program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2, 3, 4)))(*arrays)
    largest = max(sizes(program.jaxpr))
    assert largest <= 1.1 * 2**22 < T * S


def sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (int(np.prod(var.aval.shape)) for var in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_the_program_does_not_grow_with_the_sequence():
    """Time to compile follows the program's size: unrolled tiles would grow with T."""

    def size(T):
        S = T // 16
        shapes = [(1, T, 2, 16), (1, T, 4), (1, T, 4, 16), (1, 4, S, 16), (1, 4, S, 16)]

        def total(q, own_logits, own_values, keys, values):
            ends = ChunkEnds(keys, values)
            return jnp.sum(
                chunk_attention(q, own_logits, own_values, ends, chunk=16, scale=1.0)
            )

        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        gradient = jax.grad(total, argnums=(0, 1, 2, 3, 4))
        return equations(jax.make_jaxpr(gradient)(*arrays).jaxpr)

    assert size(16384) == size(32768)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "wants chunk of at least 1, got 0"),
        ({"q": jnp.zeros((B, 7, 3, E))}, "3 groups for 4 heads"),
        ({"own_logits": jnp.zeros((B, 6, H))}, "wants own_logits of shape"),
        ({"first": jnp.zeros(3, int)}, "wants first of shape"),
        ({"documents": jnp.zeros((B, 7), int)}, "or neither, got one of them"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(change, message):
    (q, own_logits, own_values, keys, values), options = inputs(7)
    arguments = {
        "q": q,
        "own_logits": own_logits,
        "own_values": own_values,
        "ends": ChunkEnds(keys, values),
        **options,
    }
    with pytest.raises(ValueError, match=message):
        UNCHECKED(**(arguments | change))


def test_an_unknown_backend_is_named():
    (q, own_logits, own_values, keys, values), options = inputs(1)
    ends = ChunkEnds(keys, values)
    with pytest.raises(ValueError, match="wants an implementation of"):
        UNCHECKED(q, own_logits, own_values, ends, **options, implementation="cuda")
