"""Chunk attention: the XLA backend against the definition; the lse-sum-exp trap."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import few_queries
from pallas_kernels.chunk_attention import (
    BlockSizes,
    ChunkEnds,
    api,
    chunk_attention,
    mosaic_tpu,
    triton,
    xla,
    xla_cuts,
)
from pallas_kernels.chunk_attention.reference import chunk_attention_reference
from pallas_kernels.target import Target, as_if
from tests.compiling import QUICK_COMPILE, equations, sizes
from tests.pallas_kernels.chunk_attention.cases import (
    KERNEL_CASES,
    Case,
    assert_is_the_definition,
    by_arrays,
    kernel_cases,
    op_passes,
)
from tests.pallas_kernels.laws import Call, OpLaws, OracleCase
from tests.tolerances import assert_values_close

B, H, E, CHUNK = 2, 4, 4, 3
SMALL = Case(13, width=E)
# Several blocks along each axis; a block of positions spans several chunks.
TRITON = BlockSizes(
    block_q=16, block_k=4, backward_block_q=8, backward_block_k=4, splits=1
)
MOSAIC = BlockSizes(block_q=16, block_k=4)
PASSES = partial(op_passes, chunk_attention)
UNCHECKED = getattr(chunk_attention, "__wrapped__", chunk_attention)


@pytest.fixture
def small_bands(monkeypatch):
    """Several bands, and several blocks in each."""
    monkeypatch.setattr(xla_cuts, "_BAND_LOGITS", 200)
    monkeypatch.setattr(xla_cuts, "_BLOCK_LOGITS", 150)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles along both axes, of positions in several chunks."""
    monkeypatch.setattr(xla_cuts, "_TILE", 4)


@pytest.mark.parametrize("ends", [3, 8, 11])
def test_one_row_s_sums_over_parts_of_the_ends_are_the_definition(ends, monkeypatch):
    monkeypatch.setattr(few_queries, "PART", 4)
    (*arrays, keys, values), first, *_ = Case(
        1, ends=ends, first=(ends - 1,), batch=1, chunk=1
    ).inputs()
    options = {"chunk": 1, "scale": 0.3, "first": first}
    h100 = Target(platform="gpu", kind="H100", compute_capability="9.0")

    def run(*arrays):
        return chunk_attention(*arrays, ChunkEnds(keys, values), **options)

    with as_if(h100):
        assert str(jax.make_jaxpr(run)(*arrays)).count("optimization_barrier") == (
            ends > 4
        )
        got = jax.jit(run)(*arrays)
    want = chunk_attention_reference(*arrays, ChunkEnds(keys, values), **options)
    assert_values_close(got, want)


class TestLaws(OpLaws):
    op = api.OP
    function = staticmethod(partial(by_arrays, chunk_attention))
    unchecked = staticmethod(partial(by_arrays, UNCHECKED))
    reference = staticmethod(partial(by_arrays, chunk_attention_reference))
    backends = {
        "xla": (xla, {}),
        "triton": (triton, {"interpret": True, "blocks": TRITON}),
        "mosaic_tpu": (mosaic_tpu, {"interpret": True, "blocks": MOSAIC}),
    }
    timed = ("q", "own_logits", "own_values")
    rowed = (*timed, "keys", "values")
    oracle_cases = [
        *(OracleCase("xla", T, {"width": E}) for T in (1, 7, 12, 13)),
        OracleCase("xla", 1, {"width": E, "chunk": 1, "ends": 6, "first": (5, 2)}),
        OracleCase("xla", 13, {"width": E}, "bfloat16"),
        *kernel_cases("triton", KERNEL_CASES),
        *kernel_cases("mosaic_tpu", KERNEL_CASES),
        OracleCase("mosaic_tpu", 19, {"width": 128}).slow(),
    ]

    def call(self, length, **switches):
        case = Case(length, **switches)
        arrays, first, documents, end_documents = case.inputs()
        rest = {"first": first, "documents": documents, **case.options}
        names = ("q", "own_logits", "own_values", "keys", "values")
        named = dict(zip(names, arrays, strict=True))
        return Call(named, rest | {"end_documents": end_documents})

    def changed_from(self, call, at):
        changed = super().changed_from(call, at)
        own = at // call.rest["chunk"]  # Its end holds later positions too.
        ends = {k: call.arrays[k].at[:, :, own:].add(0.5) for k in ("keys", "values")}
        return changed._replace(arrays=changed.arrays | ends)

    def in_two(self, call, at, backend):
        def part(positions, chunks_before):
            timed = {k: call.arrays[k][:, positions] for k in self.timed}
            first = jnp.full(call.arrays["q"].shape[0], chunks_before, jnp.int32)
            part = Call(call.arrays | timed, call.rest | {"first": first})
            return self.outputs(backend, part)[0]

        early, late = part(slice(at), 0), part(slice(at, None), at // CHUNK)
        return jnp.concatenate([early, late], axis=1)


@pytest.mark.parametrize("groups", [1, 4])
def test_bands_and_blocks_change_nothing(groups, small_bands):
    cut = xla_cuts.choose_bands(B, 13, H, 5, causal=True)
    assert cut.bands > 1 and cut.blocks > 1
    assert_is_the_definition(PASSES, SMALL._replace(groups=groups))


def test_rows_in_later_chunks_see_cached_ends(small_bands):
    case = SMALL._replace(length=7, ends=6, first=(3, 0))
    assert_is_the_definition(PASSES, case)


def test_documents_do_not_see_each_other(small_bands):
    assert_is_the_definition(PASSES, SMALL._replace(length=12, documents=True))


@pytest.mark.parametrize(
    "change",
    [
        {"length": 29},
        pytest.param({"length": 32, "chunk": 2, "groups": 4}, marks=pytest.mark.slow),
        {"length": 10, "ends": 9, "first": (6, 0)},
        pytest.param({"length": 29, "documents": True}, marks=pytest.mark.slow),
        pytest.param({"length": 29, "dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=["prime", "whole tiles", "cached ends", "documents", "bfloat16"],
)
def test_tiles_change_nothing(change, small_tiles):
    case = SMALL._replace(**change)
    ends = case.inputs()[0][3].shape[2]
    assert xla_cuts.choose_tiles(case.length, ends) is not None
    assert_is_the_definition(PASSES, case)


def test_a_position_of_the_first_chunk_is_its_own_value():
    case = SMALL._replace(length=7, chunk=7, ends=0)
    arrays = case.inputs()[0]
    o, _ = PASSES(case, arrays)
    np.testing.assert_array_equal(o, arrays[2])


@pytest.mark.parametrize(
    "tile", [pytest.param(4, marks=pytest.mark.slow), 512], ids=["tiles", "bands"]
)
def test_gradients_are_finite_differences(tile, monkeypatch):
    """The trap: a merge through a library's lse-sum-exp has a wrong gradient."""
    monkeypatch.setattr(xla_cuts, "_TILE", tile)
    with jax.enable_x64(True):
        case = SMALL._replace(length=7, chunk=1, dtype="float64")
        arrays = case.inputs()[0]

        @jax.jit
        def total(q, own_logits, own_values, keys, values):
            ends = ChunkEnds(keys, values)
            o = chunk_attention(q, own_logits, own_values, ends, **case.options)
            return jnp.sum(jnp.sin(o))

        jax.test_util.check_grads(total, arrays, order=1, modes=["rev"], rtol=1e-6)
        gradients = jax.grad(total, argnums=(0, 1))(*arrays)
        assert all(np.abs(g[:, 1:]).max() > 1e-3 for g in gradients)


@pytest.mark.parametrize("cut", ["small_bands", "small_tiles"])
def test_the_future_does_not_leak_into_the_past(cut, request):
    request.getfixturevalue(cut)
    arrays = SMALL.inputs()[0]

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(arrays):
        q, own_logits, own_values, keys, values = arrays
        ends = ChunkEnds(keys, values)
        return chunk_attention(q, own_logits, own_values, ends, **SMALL.options)

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
def test_bands_have_whole_products_and_short_calls_one(shape, cut):
    chosen = xla_cuts.choose_bands(*shape, causal=True)
    assert (chosen.block_q, chosen.blocks, chosen.bands) == cut


@pytest.mark.parametrize(
    ("length", "ends", "tiles"),
    [
        (4096, 4096, (512, 512)),
        (16384, 1023, (1024, 256)),
        (4096, 255, None),
        (1, 4096, None),
    ],
)
def test_heads_of_many_logits_are_cut_into_tiles(length, ends, tiles):
    chosen = xla_cuts.choose_tiles(length, ends)
    assert (chosen and (chosen.block_q, chosen.block_k)) == tiles


@pytest.mark.parametrize("chunk", [16, 64], ids=["tiles", "bands"])
def test_logits_of_long_sequences_stay_in_blocks(chunk):
    """No array of T x S elements anywhere in the program, at T 32768."""
    T, S = 32768, 32768 // chunk
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
            chunk_attention(q, own_logits, own_values, ends, chunk=chunk, scale=1.0)
        )

    program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2, 3, 4)))(*arrays)
    largest = max(sizes(program.jaxpr))
    assert largest <= 1.1 * 2**22 < T * S


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
        ({"chunk": 0}, "needs chunk of at least 1, got 0"),
        ({"q": jnp.zeros((B, 7, 3, E))}, "3 groups for 4 heads"),
        ({"own_logits": jnp.zeros((B, 6, H))}, "needs own_logits of shape"),
        ({"first": jnp.zeros(3, int)}, "needs first of shape"),
        ({"first": jnp.zeros(B)}, "needs integer first, got float32"),
        ({"q": jnp.zeros((0, 7, 2, E))}, "of 1 or more"),
        ({"documents": jnp.zeros((B, 7), int)}, "together, got one of them"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(change, message):
    q, own_logits, own_values, keys, values = SMALL._replace(length=7).inputs()[0]
    arguments = {
        "q": q,
        "own_logits": own_logits,
        "own_values": own_values,
        "ends": ChunkEnds(keys, values),
        **SMALL.options,
    }
    with pytest.raises(ValueError, match=message):
        UNCHECKED(**(arguments | change))
