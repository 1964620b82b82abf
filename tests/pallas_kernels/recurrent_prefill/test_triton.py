"""The GPU kernels in interpret mode against the reference."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels.recurrent_prefill.call import BlockSizes, Rows, empty_cache
from pallas_kernels.recurrent_prefill.triton import backend as triton
from pallas_kernels.recurrent_prefill.triton.launch import (
    Launch,
    choose_tiles,
)
from pallas_kernels.recurrent_prefill.triton.products import ColumnSplit
from pallas_kernels.target import Target, as_if, shared_memory_bytes
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
    key_heads=1,
    norm="layer",
    gated=True,
    biases=True,
    activation="silu",
    normed_persistent=False,
)
WAVEFRONT = Case(positions=33, layers=2, biases=True, schedule="wavefront")


@pytest.mark.parametrize("positions", [1, pytest.param(16, marks=pytest.mark.slow), 17])
def test_kernels_compute_what_the_reference_does(positions):
    case = PLAIN._replace(positions=positions)
    assert_values_close(values(triton, case), reference_values(case))


def test_values_and_gradients_are_the_reference_s():
    check_values_and_gradients(PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(EVERYTHING, id="switches", marks=pytest.mark.sweep),
        pytest.param(WAVEFRONT, id="wavefront"),
    ],
)
def test_values_and_gradients_are_the_reference_s_with(case):
    check_values_and_gradients(case)


@pytest.mark.slow
def test_bfloat16_kernels_stay_near_the_float32_reference():
    check_values_and_gradients(PLAIN._replace(dtype="bfloat16"))


@pytest.mark.parametrize("name", ["gelu_tanh", "relu_squared"])
@pytest.mark.slow
def test_other_activations_are_the_reference_s(name):
    case = Case(positions=3, activation=name)
    assert_values_close(values(triton, case), reference_values(case))


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        # A tile of two sub-tiles, then the beginning of one.
        (PLAIN._replace(positions=37), 32),
        pytest.param(
            # One tile whose third sub-tile is partial; heads that share keys.
            EVERYTHING._replace(positions=35, batch=2),
            64,
            marks=pytest.mark.slow,
        ),
        pytest.param(WAVEFRONT._replace(positions=49), 32, marks=pytest.mark.sweep),
    ],
    ids=["two", "four", "wavefront"],
)
def test_sub_tiles_read_each_other(case, tile):
    assert_values_close(values(triton, case, tile=tile), reference_values(case))


def test_layers_of_a_wavefront_without_a_tile_are_skipped():
    """In the program for a GPU; the interpreter makes what they write not a number."""
    case = WAVEFRONT._replace(positions=48)  # 3 tiles, 4 steps of two layers
    x, weights, _ = case.inputs()
    with as_if(Target(platform="gpu", kind="", compute_capability="9.0")):
        run = partial(triton.forward, residuals=True)
        traced = jax.make_jaxpr(run)(case.call(x, weights))
    kernels = [
        e.params for e in equations(traced.jaxpr) if "pallas" in str(e.primitive)
    ]
    assert kernels
    for kernel in kernels:
        (branch,) = [e for e in kernel["jaxpr"].eqns if e.primitive.name == "cond"]
        idle, busy = branch.params["branches"]
        assert not idle.jaxpr.eqns and busy.jaxpr.eqns


def equations(jaxpr):
    """Yields all equations but those of kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if "pallas" not in str(equation.primitive):
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner)


def test_products_cut_along_the_contracted_axis_are_whole():
    """By the last program of each part, in the same order whichever it is."""
    small = interpreted(triton)["blocks"]
    blocks = dataclasses.replace(small, columns=16, splits=4)
    case = PLAIN._replace(positions=5, batch=17)
    assert ColumnSplit.of(launch_of(case, blocks), jnp.zeros((1, 64, 32)), 32) == (
        16,
        2,
    )
    assert_values_close(values(triton, case, blocks=blocks), reference_values(case))


@pytest.mark.parametrize(
    ("batch", "contracted", "want"),
    [
        # Few rows: most of the GPU would be idle without splits.
        (32, 4096, (32, 4)),
        (32, 1024, (32, 4)),
        # More: wide columns read rows less often.
        (512, 4096, (128, 4)),
        (512, 1024, (64, 2)),
        # Rows enough for all multiprocessors.
        (2048, 4096, (128, 1)),
    ],
)
def test_columns_and_splits_move_the_fewest_bytes_a_multiprocessor(
    batch, contracted, want
):
    spec = dataclasses.replace(PLAIN.spec, heads=16, dtype="bfloat16")
    sizes = {"tile": None, "spec": spec, "shared": 232_448, "direction": "forward"}
    launch = Launch(spec=spec, tiles=choose_tiles(batch=batch, **sizes), shared=232_448)
    assert ColumnSplit.of(launch, jnp.zeros((1, contracted, 1024)), batch) == want


def launch_of(case: Case, blocks: BlockSizes) -> Launch:
    sizes = {"batch": case.batch, "tile": 16, "spec": case.spec, "shared": 232_448}
    tiles = choose_tiles(**sizes, direction="forward", blocks=blocks)
    return Launch(spec=case.spec, tiles=tiles, shared=232_448)


def test_few_rows_have_more_operands_on_their_way():
    spec = dataclasses.replace(PLAIN.spec, dtype="bfloat16")

    def chosen(batch, shared, columns=32):
        sizes = {"tile": None, "spec": spec, "shared": shared, "direction": "forward"}
        tiles = choose_tiles(batch=batch, **sizes)
        launch = Launch(spec=spec, tiles=tiles, shared=shared)
        return tiles.depth, launch.stages(columns)

    assert chosen(32, 232_448) == chosen(64, 232_448) == (128, 6)
    assert chosen(64, 232_448, columns=128) == (128, 4)
    assert chosen(512, 232_448) == (64, 3)
    # A10, L4: the widest product at this depth has no room.
    assert chosen(64, 101_376) == (64, 6)


def test_the_backward_pass_has_tiles_of_its_own():
    sizes = {"batch": 512, "tile": None, "spec": PLAIN.spec, "shared": 232_448}

    def chosen(direction, schedule=None):
        tiles = choose_tiles(**sizes, direction=direction, schedule=schedule)
        return tiles.tile, tiles.sub_tile

    assert chosen("forward") == (64, 16)
    assert chosen("forward", "wavefront") == (32, 16)
    assert chosen("backward")[0] == 32


def check_values_and_gradients(case: Case) -> None:
    (z, gradients), (want_z, want) = values_and_gradients(triton, case), reference(case)
    assert_values_close(z, want_z, case.dtype)
    assert_gradients_close(gradients, want, case.dtype)


def test_a_cut_sequence_with_the_cache_equals_the_whole():
    case = PLAIN
    x, weights, _ = case.inputs()

    def forward(*call):
        call = case.call(*call, **interpreted(triton))
        return triton.forward(call, residuals=False)[0]

    def run(x, weights, cuts):
        cache = empty_cache(1, case.batch, 24, case.width, case.spec)
        first = Rows(lengths=jnp.asarray(cuts))
        _, cache = forward(x[:, :5], weights, cache, first)
        padding = cache.keys[0, 1, 3:]
        rest = jnp.stack([x[row, cut : cut + 14] for row, cut in enumerate(cuts)])
        return *forward(rest, weights, cache), padding

    cuts = (5, 3)
    z, cache, padding = quick_jit(run, static_argnums=2)(x, weights, cuts)
    want = reference_values(case)
    want = jnp.stack([want[row, cut : cut + 14] for row, cut in enumerate(cuts)])
    assert_values_close(z, want)
    assert cache.position.tolist() == [19, 17]
    assert not padding.any()


@pytest.mark.sweep
def test_rows_apart_fill_a_cache_by_sub_tiles():
    """Row 0 is full after 20 more; the padding behind them has no slots."""
    case = PLAIN._replace(positions=40)
    x, weights, _ = case.inputs()

    def forward(*call):
        call = case.call(*call, tile=32, **interpreted(triton))
        return triton.forward(call, residuals=False)[0]

    def run(x, weights):
        cache = empty_cache(1, case.batch, 40, case.width, case.spec)
        first = Rows(lengths=jnp.array([20, 3]))
        _, cache = forward(x[:, :20], weights, cache, first)
        rest = jnp.stack([jnp.pad(x[0, 20:], ((0, 17), (0, 0))), x[1, 3:]])
        rows = Rows(lengths=jnp.array([20, 37]))
        return forward(rest, weights, cache, rows)

    z, cache = quick_jit(run)(x, weights)
    want = reference_values(case)
    assert_values_close(z[0, :20], want[0, 20:])
    assert_values_close(z[1], want[1, 3:])
    assert cache.position.tolist() == [40, 40]


@pytest.mark.slow
def test_gradients_reach_a_filled_cache_as_on_the_xla_path():
    case = PLAIN._replace(positions=6)
    check_gradients_of_a_filled_cache(triton, case, start=(4, 2), slots=12)


@pytest.mark.parametrize(
    ("capability", "batch", "dtype", "depth"),
    [
        ("9.0", 64, "bfloat16", 64),
        ("8.0", 128, "bfloat16", 64),
        ("8.6", 16, "bfloat16", 64),
        ("8.6", 128, "bfloat16", 64),
        ("99.9", 128, "bfloat16", 64),
        ("9.0", 64, "float32", 32),
        ("9.0", 128, "float32", 16),
        ("8.9", 128, "float32", 16),
    ],
)
def test_targets_with_less_shared_memory_read_less_at_once(
    capability, batch, dtype, depth
):
    device = Target(platform="gpu", kind="a GPU", compute_capability=capability)
    with as_if(device):
        shared = shared_memory_bytes()
    spec = dataclasses.replace(PLAIN.spec, dtype=dtype)
    given = {"tile": None, "spec": spec, "direction": "backward"}
    tiles = choose_tiles(batch=batch, shared=shared, **given)
    # Rows and columns stay: they say how often weights are read.
    assert (tiles.rows, tiles.columns, tiles.depth) == (batch, 128, depth)


def test_one_layer_in_training_writes_in_place_and_scatters_nothing():
    """A scatter by row has XLA transpose full arrays, once a tile."""
    traced = jax.make_jaxpr(both_passes(triton, PLAIN))(*PLAIN.inputs())
    assert "pallas_call" in str(traced) and "scatter" not in str(traced)


def test_what_the_kernels_cannot_do_is_refused_with_a_reason():
    spec = PLAIN.spec
    change = dataclasses.replace
    assert refusal(triton, PLAIN) is None
    assert "block=2" in str(refusal(triton, PLAIN, spec=change(spec, block=2)))
    rope = change(spec, rope_base=1e4, rope_width=16)
    assert "rotary" in str(refusal(triton, PLAIN, spec=rope))
    documents = Rows(segments=jnp.zeros((2, 19), jnp.int32))
    assert "segments" in str(refusal(triton, PLAIN, rows=documents))
    assert "tile=24" in str(refusal(triton, PLAIN, tile=24))
    assert "schedule" in str(refusal(triton, PLAIN, schedule="naive"))
    assert "float32" in str(refusal(triton, PLAIN, spec=change(spec, dtype="float64")))
    narrow = change(spec, heads=4, key_heads=4, head_width=8)
    assert "head_width" in str(refusal(triton, PLAIN, spec=narrow))


def test_a_decode_step_is_left_to_xla():
    one = PLAIN._replace(positions=1)
    assert "decode step" in str(refusal(triton, one, slots=4))
    assert refusal(triton, one) is None
    assert refusal(triton, PLAIN, slots=24) is None


def test_without_a_gpu_the_backend_says_so():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    reason = triton.supported(PLAIN.call(*PLAIN.inputs()[:2]))
    assert reason == "needs an NVIDIA GPU, found cpu"
