"""The TPU kernels in interpret mode against the reference."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.recurrent_prefill.call import Rows, empty_cache
from pallas_kernels.recurrent_prefill.mosaic_tpu import backend as mosaic_tpu
from pallas_kernels.recurrent_prefill.mosaic_tpu.backward import SPAN
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import (
    CHUNK,
    LayerSizes,
    backward_bytes,
    choose_tiles,
    forward_bytes,
    refusal_of_sizes,
)
from pallas_kernels.recurrent_prefill.reference import recurrent_prefill_reference
from pallas_kernels.recurrent_prefill.xla import backend as xla
from pallas_kernels.target import LEAST_VMEM, MOST_VMEM
from tests.marks import slow_except
from tests.pallas_kernels.recurrent_prefill.layer_cases import (
    Case,
    both_passes,
    check_gradients_of_a_filled_cache,
    interpreted,
    quick_jit,
    reference,
    reference_values,
    refusal,
    values,
    values_and_gradients,
)
from tests.tolerances import assert_gradients_close, assert_values_close

PLAIN = Case(positions=19)
EVERYTHING = Case(
    positions=17,
    layers=2,
    batch=3,
    norm="layer",
    gated=True,
    biases=True,
    activation="silu",
    normed_persistent=False,
)
GROUPED = Case(positions=18, heads=4, key_heads=2, norm="layer", biases=True)
PAPER = LayerSizes(
    batch=512,
    positions=512,
    width=1024,
    heads=16,
    heads_width=1024,
    inner_width=4096,
    gated=False,
    bytes=2,
)
V5E, V5P = MOST_VMEM, LEAST_VMEM


@pytest.mark.parametrize("positions", [1, pytest.param(32, marks=pytest.mark.slow), 33])
def test_the_kernel_computes_what_the_reference_does(positions):
    case = PLAIN._replace(positions=positions)
    assert_values_close(values(mosaic_tpu, case), reference_values(case))


def test_values_and_gradients_are_the_reference_s():
    check_values_and_gradients(PLAIN)


# More heads than fit a register's 128 lanes side by side: 2 + 2 and 3 + 1 of them. The
# second tile reads the first through them, each head with its own slope.
@pytest.mark.parametrize("head_width", [pytest.param(64, marks=pytest.mark.sweep), 40])
def test_heads_of_several_groups_are_the_reference_s(head_width):
    case = Case(positions=19, heads=4, key_heads=4, head_width=head_width)
    assert_values_close(values(mosaic_tpu, case), reference_values(case))


# Three chunks of the prefix, the last one not full; without ALiBi and with, since
# distances hide what is read at a wrong place.
@pytest.mark.parametrize("alibi", [8.0, pytest.param(None, marks=pytest.mark.slow)])
def test_a_prefix_of_several_chunks_is_the_reference_s(alibi):
    case = Case(positions=2 * CHUNK + 35, batch=1, alibi=alibi)
    assert_values_close(values(mosaic_tpu, case), reference_values(case))


# Three programs of 64 rows, the last one mostly empty: rows go in blocks, pairs to HBM
# and back.
@pytest.mark.sweep
def test_a_batch_that_is_no_multiple_of_the_rows_is_the_reference_s():
    case = Case(positions=18, batch=130)
    sizes = LayerSizes.of(*case.inputs()[:2], case.spec)
    assert choose_tiles(sizes, 16, MOST_VMEM, forward_bytes).rows == 64
    check_values_and_gradients(case)


# Eleven tiles: the second of two spans of queries overlaps the first.
@pytest.mark.slow
def test_gradients_over_several_spans_are_the_reference_s():
    check_values_and_gradients(Case(positions=SPAN + 35, batch=1))


@pytest.mark.sweep
def test_gradients_of_several_groups_are_the_reference_s():
    check_values_and_gradients(Case(positions=19, heads=4, key_heads=4, head_width=40))


# Rows stand at 5 and 3 slots of the cache, then at 19 and 17: two programs' rows read
# chunks of it that one of them has not filled.
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"key_heads": 1}, marks=pytest.mark.sweep),
        pytest.param({"rope_width": 16, "alibi": None}, marks=pytest.mark.sweep),
    ],
    ids=["", "grouped", "rotated"],
)
def test_a_cut_sequence_with_the_cache_equals_the_whole(changes):
    case = PLAIN._replace(positions=40, **changes)
    x, weights, _ = case.inputs()

    def forward(*call):
        call = case.call(*call, **interpreted(mosaic_tpu))
        return mosaic_tpu.forward(call, residuals=False)[0]

    def run(x, weights, cuts):
        cache = empty_cache(1, case.batch, 44, case.width, case.spec)
        first = Rows(lengths=jnp.asarray(cuts))
        _, cache = forward(x[:, :5], weights, cache, first)
        padding = cache.keys[0, 1, 3:]
        outputs = []
        for count in (14, 20):
            more = [x[row, cut : cut + count] for row, cut in enumerate(cuts)]
            z, cache = forward(jnp.stack(more), weights, cache)
            outputs.append(z)
            cuts = tuple(cut + count for cut in cuts)
        return jnp.concatenate(outputs, axis=1), cache, padding

    cuts = (5, 3)
    z, cache, padding = quick_jit(run, static_argnums=2)(x, weights, cuts)
    want = reference_values(case)
    want = jnp.stack([want[row, cut : cut + 34] for row, cut in enumerate(cuts)])
    assert_values_close(z, want)
    assert cache.position.tolist() == [39, 37]
    assert not padding.any()


# More than one chunk of the cache for one row and less than one for the other, whose
# free slots hold NaN; beyond them a row of another program's that holds nothing.
@pytest.mark.slow
@pytest.mark.parametrize("alibi", [8.0, pytest.param(None, marks=pytest.mark.sweep)])
def test_a_cache_of_several_chunks_is_read_as_on_the_xla_path(alibi):
    case = PLAIN._replace(positions=CHUNK + 20, batch=9, alibi=alibi)
    x, weights, _ = case.inputs()
    cache = empty_cache(1, 9, 3 * CHUNK + 40, case.width, case.spec)
    start = jnp.asarray([CHUNK + 9, 17, *[1] * 6, 0], jnp.int32)
    free = (jnp.arange(cache.slots) >= start[:, None])[:, :, None, None]
    keys, values = (
        jax.random.normal(key, cache.keys.shape)
        for key in jax.random.split(jax.random.key(1))
    )
    clean = cache._replace(keys=keys, values=values, position=start)
    dirty = clean._replace(
        keys=jnp.where(free, jnp.nan, keys), values=jnp.where(free, jnp.nan, values)
    )

    def run(backend, cache, **interpret):
        call = case.call(x, weights, cache, **interpret)
        (z, cache), _ = backend.forward(call, residuals=False)
        return z, cache.keys, cache.values

    got = quick_jit(lambda: run(mosaic_tpu, dirty, **interpreted(mosaic_tpu)))()
    want = quick_jit(lambda: run(xla, clean))()
    assert_values_close(got[0], want[0])
    seen = jnp.arange(cache.slots) < start[:, None] + case.positions
    for new, old in zip(got[1:], want[1:], strict=True):
        assert_values_close(new[0][seen], old[0][seen])


@pytest.mark.parametrize(
    "changes",
    slow_except(
        (),
        [
            pytest.param({}, id="plain"),
            pytest.param({"key_heads": 1}, id="grouped"),
            pytest.param({"rope_width": 16}, id="rotated"),
        ],
        slow=["grouped"],
    ),
)
def test_gradients_reach_a_filled_cache_as_on_the_xla_path(changes):
    case = PLAIN._replace(positions=21, **changes)
    check_gradients_of_a_filled_cache(mosaic_tpu, case, start=(4, 2), slots=30)


# Half of a head's channels turn, and the others pass.
def test_rotated_heads_are_the_reference_s():
    case = PLAIN._replace(rope_width=8, alibi=None)
    check_values_and_gradients(case)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    [
        GROUPED._replace(rope_width=16, positions=35),
        Case(positions=19, heads=4, key_heads=4, head_width=40, rope_width=40),
        PLAIN._replace(rope_width=16, batch=1, layers=2),
    ],
    ids=["grouped", "heads of 40", "one row"],
)
def test_rotated_heads_are_the_reference_s_with(case):
    check_values_and_gradients(case)


# Documents that end inside a tile and between tiles, one that comes twice; the second
# row has one. Slopes and own pairs do not hide what is read across them.
@pytest.mark.slow
def test_documents_are_kept_apart_as_in_the_reference():
    check_documents(PLAIN._replace(positions=37), [(9, 11, 5, 8, 4), (37,)])


# A chunk of the prefix none of whose pairs a query may see, and one between two.
@pytest.mark.slow
def test_documents_over_several_chunks_are_the_reference_s():
    lengths = [(20, 2 * CHUNK + 20, 19), (CHUNK + 3, CHUNK + 56)]
    check_documents(Case(positions=2 * CHUNK + 59, alibi=None), lengths)


@pytest.mark.sweep
def test_documents_of_several_groups_are_the_reference_s():
    case = Case(positions=35, heads=4, key_heads=2, head_width=40)
    check_documents(case, [(3, 20, 12), (18, 17)])


def check_documents(case: Case, lengths: list[tuple[int, ...]]) -> None:
    """Compares both passes; documents 0, 3, ... of a row have the same number."""
    numbers = [np.repeat(np.arange(len(row)) % 3, row) for row in lengths]
    rows = Rows(segments=jnp.asarray(np.stack(numbers), jnp.int32))
    z, gradients = values_and_gradients(mosaic_tpu, case, rows)
    x, weights, dz = case.inputs()

    def run(x, weights, dz):
        compute = partial(
            recurrent_prefill_reference, spec=case.spec, segments=rows.segments
        )
        z, back = jax.vjp(compute, x, weights)
        return z, back(dz)

    want_z, want = quick_jit(run)(x, weights, dz)
    assert_values_close(z, want_z)
    assert_gradients_close(gradients, want)


@pytest.mark.slow
def test_longer_tiles_compute_what_the_reference_does():
    case = PLAIN._replace(positions=67)
    assert_values_close(values(mosaic_tpu, case, tile=32), reference_values(case))


def test_grouped_heads_are_the_reference_s():
    assert_values_close(values(mosaic_tpu, GROUPED), reference_values(GROUPED))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(EVERYTHING, id="switches"),
        pytest.param(GROUPED, id="grouped heads", marks=pytest.mark.sweep),
        pytest.param(
            PLAIN._replace(dtype="bfloat16"), id="bfloat16", marks=pytest.mark.sweep
        ),
    ],
)
def test_values_and_gradients_are_the_reference_s_with(case):
    check_values_and_gradients(case)


def check_values_and_gradients(case: Case) -> None:
    z, gradients = values_and_gradients(mosaic_tpu, case)
    want_z, want = reference(case)
    assert_values_close(z, want_z, case.dtype)
    assert_gradients_close(gradients, want, case.dtype)


@pytest.mark.sweep
def test_the_tpu_s_own_semantics_find_no_race():
    case = PLAIN._replace(positions=17)
    z = values(mosaic_tpu, case, interpret=pltpu.InterpretParams(detect_races=True))
    assert_values_close(z, reference_values(case))


@pytest.mark.slow
def test_the_tpu_s_own_semantics_find_no_race_with_a_cache():
    case = PLAIN._replace(positions=17)
    x, weights, _ = case.inputs()
    cache = empty_cache(1, case.batch, CHUNK + 20, case.width, case.spec)
    cache = cache._replace(position=jnp.asarray([CHUNK + 1, 2], jnp.int32))
    keys, values = (
        jax.random.normal(key, cache.keys.shape)
        for key in jax.random.split(jax.random.key(1))
    )
    cache = cache._replace(keys=keys, values=values)

    def run(backend, **interpret):
        call = case.call(x, weights, cache, **interpret)
        return backend.forward(call, residuals=False)[0][0]

    races = pltpu.InterpretParams(detect_races=True)
    got = quick_jit(lambda: run(mosaic_tpu, interpret=races))()
    assert_values_close(got, quick_jit(lambda: run(xla))())


def rows_of(sizes: LayerSizes, vmem: int, needed=forward_bytes) -> int:
    return choose_tiles(sizes, None, vmem, needed).rows


def test_a_layer_of_the_paper_has_128_rows():
    assert refusal_of_sizes(PAPER, None, V5E) is None
    assert rows_of(PAPER, V5E) == rows_of(PAPER, V5E, backward_bytes) == 128


def test_a_layer_of_twice_the_width_has_fewer_rows():
    wide = dataclasses.replace(
        PAPER, width=2048, heads=32, heads_width=2048, inner_width=8192
    )
    assert refusal_of_sizes(wide, None, V5E) is None
    assert rows_of(wide, V5E) == rows_of(wide, V5E, backward_bytes) == 32
    assert "56 MiB of VMEM" in str(refusal_of_sizes(wide, None, V5P))


def test_long_sequences_are_cut_into_longer_tiles():
    long = dataclasses.replace(PAPER, positions=4096)
    tiles = choose_tiles(long, None, V5E, forward_bytes)
    assert (tiles.tile, tiles.rows) == (32, 128)
    for vmem in (V5E, V5P):
        assert refusal_of_sizes(long, None, vmem) is None


def test_a_program_has_as_many_rows_as_leave_few_empty():
    chosen = {
        batch: rows_of(dataclasses.replace(PAPER, batch=batch), V5E)
        for batch in (1, 8, 24, 64, 65, 130)
    }
    assert chosen == {1: 8, 8: 8, 24: 32, 64: 64, 65: 128, 130: 64}


def test_row_tiles_are_shared_out_over_a_tpu_s_cores():
    case = PLAIN._replace(positions=17)
    traced = str(jax.make_jaxpr(both_passes(mosaic_tpu, case))(*case.inputs()))
    semantics = re.findall(r"dimension_semantics=\((.*?)\)", traced)
    assert len(semantics) >= 2
    assert set(semantics) == {"'parallel', 'arbitrary'"}


def test_weights_that_do_not_fit_into_vmem_are_refused():
    wide = dataclasses.replace(PAPER, width=4096, heads_width=4096, inner_width=16384)
    reason = refusal_of_sizes(wide, None, V5E)
    assert "weights and a tile of 8 rows must fit 120 MiB of VMEM, got" in str(reason)


def test_widths_are_refused_that_leave_lanes_of_a_tile_empty():
    for field, name in (("width", "D"), ("inner_width", "F")):
        odd = dataclasses.replace(PAPER, **{field: 192})
        message = f"{name} must be a multiple of 128, got 192"
        assert refusal_of_sizes(odd, None, V5E) == message


def test_half_the_vmem_holds_a_layer_of_the_paper():
    assert rows_of(PAPER, V5P) == 128
    assert rows_of(PAPER, V5P, backward_bytes) == 64
    assert refusal_of_sizes(PAPER, None, V5P) is None


def test_what_the_kernel_cannot_do_is_refused_with_a_reason():
    spec = PLAIN.spec
    change = dataclasses.replace
    assert "multiple of 128" in str(refusal(mosaic_tpu, PLAIN))
    assert "block=2" in str(refusal(mosaic_tpu, PLAIN, spec=change(spec, block=2)))
    one = PLAIN._replace(positions=1)
    assert "decode step" in str(refusal(mosaic_tpu, one, slots=32))
    assert refusal(mosaic_tpu, PLAIN, slots=32) == refusal(mosaic_tpu, PLAIN)
    assert "wavefront" in str(refusal(mosaic_tpu, PLAIN, schedule="wavefront"))


def test_without_a_tpu_the_backend_says_so():
    reason = mosaic_tpu.supported(PLAIN.call(*PLAIN.inputs()[:2]))
    assert str(reason).startswith("needs a TPU")
