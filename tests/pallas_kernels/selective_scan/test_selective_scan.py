"""The selective scan: its backends against the definition, and what it refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.selective_scan import (
    BlockSizes,
    api,
    mosaic_tpu,
    selective_scan,
    triton,
    xla,
)
from pallas_kernels.selective_scan.call import (
    SelectiveScanCall,
    SelectiveScanOptions,
)
from pallas_kernels.selective_scan.reference import selective_scan_reference
from tests.compiling import QUICK_COMPILE, sizes
from tests.pallas_kernels.laws import Call, OpLaws, OracleCase
from tests.tolerances import assert_gradients_close, assert_values_close

B, I, N, CHUNK = 2, 16, 8, 8
MOSAIC = BlockSizes(channels=128, unroll=2)
PLAIN = {"skip": None, "z": None, "dt_bias": None, "initial": None}


def definition(*, chunk, **arguments):
    del chunk
    return selective_scan_reference(**arguments)


class TestLaws(OpLaws):
    op = api.OP
    function = staticmethod(selective_scan)
    reference = staticmethod(definition)
    backends = {
        "xla": (xla, {}),
        "mosaic_tpu": (mosaic_tpu, {"interpret": True, "blocks": MOSAIC}),
    }
    timed = ("u", "dt", "b", "c", "z")
    rowed = (*timed, "initial")
    cuts = (1, 6)
    oracle_cases = [
        *(OracleCase("xla", length) for length in (1, 37, 64, 65)),
        OracleCase("xla", 37, {"starts": True, "lengths": True}),
        OracleCase("xla", 13, {"plain": True}),
        OracleCase("xla", 37, dtype="bfloat16"),
        OracleCase("mosaic_tpu", 13, {"starts": True, "chunk": 4}),
        OracleCase("mosaic_tpu", 37, {"chunk": 4}).slow(),
        *(OracleCase("mosaic_tpu", T, {"chunk": 4}).sweep() for T in (1, 64, 65)),
        OracleCase("mosaic_tpu", 150, {"starts": True, "channels": 256}).sweep(),
        OracleCase("mosaic_tpu", 37, {"lengths": True, "chunk": 4}).slow(),
        OracleCase("mosaic_tpu", 37, {"chunk": 4}, "bfloat16").slow(),
    ]

    def call(
        self,
        length,
        *,
        dtype="float32",
        starts=False,
        lengths=False,
        plain=False,
        chunk=CHUNK,
        channels=I,
    ):
        draw = np.random.default_rng(length)

        def normal(*shape, dtype=dtype):
            return jnp.asarray(draw.normal(size=shape), dtype)

        wide = jnp.promote_types(dtype, "float32")
        arrays = {
            "u": normal(B, length, channels),
            "dt": normal(B, length, channels),
            "a": -jnp.exp(normal(channels, N, dtype=wide)),
            "b": normal(B, length, N),
            "c": 0.3 * normal(B, length, N),
            "skip": normal(channels, dtype=wide),
            "z": normal(B, length, channels),
            "dt_bias": normal(channels, dtype=wide),
            "initial": normal(B, channels, N, dtype=wide),
        }
        if plain:
            arrays = {k: v for k, v in arrays.items() if k not in PLAIN}
            arrays["dt"] = jnp.abs(arrays["dt"])
        rest = {"starts": jnp.asarray(draw.random((B, length)) < 0.2)}
        rest |= {"lengths": jnp.asarray([length // 2, length])}
        given = {"starts": starts, "lengths": lengths}
        rest = {k: v for k, v in rest.items() if given[k]}
        return Call(arrays, rest | {"chunk": chunk})

    def meant(self, call, outputs):
        if "lengths" not in call.rest:
            return outputs
        y, final = outputs
        real = jnp.arange(y.shape[1]) < call.rest["lengths"][:, None]
        return jnp.where(real[..., None], y, 0), final

    def in_two(self, call, at, backend):
        def part(positions, **changes):
            arrays = {
                name: array[:, positions] if name in self.timed else array
                for name, array in call.arrays.items()
            }
            call_of_part = call._replace(arrays=arrays | changes)
            (out,) = self.outputs(backend, call_of_part)
            return out

        y, state = part(slice(at))
        rest, final = part(slice(at, None), initial=state)
        return api.SelectiveScanOutputs(jnp.concatenate([y, rest], axis=1), final)


LAWS = TestLaws()


def op_call(call: Call, **changes: Any) -> SelectiveScanCall:
    """Returns a call as backends receive it, with some arrays or options changed."""
    values = {**call.arrays, **call.rest, **changes}
    arrays = [values.pop(name, None) for name in SelectiveScanCall._fields[:-1]]
    return SelectiveScanCall(*arrays, SelectiveScanOptions(**values))


def test_the_chunk_changes_nothing():
    call = LAWS.call(37, starts=True)
    want = LAWS.both_passes(call, "xla")
    for chunk in (1, 5, 37, 64):
        rest = call.rest | {"chunk": chunk}
        got = LAWS.both_passes(call._replace(rest=rest), "xla")
        assert_values_close(got[0], want[0])
        assert_gradients_close(got[1], want[1])


@pytest.mark.parametrize("bias", [True, False])
def test_padding_leaves_the_state_to_the_bit(bias):
    call = LAWS.call(7, starts=True)
    arrays = call.arrays if bias else call.arrays | {"dt_bias": None}
    rest = call.rest | {"starts": call.rest["starts"].at[:, -1].set(True)}
    y, final = selective_scan(**arrays, **rest, lengths=jnp.asarray([0, 5]))
    np.testing.assert_array_equal(final[0], arrays["initial"][0])
    first = {k: x[:, :5] if k in LAWS.timed else x for k, x in arrays.items()}
    want = selective_scan(**first, starts=rest["starts"][:, :5])
    np.testing.assert_array_equal(final[1], want.final[1])
    np.testing.assert_array_equal(y[1, :5], want.y[1])


def test_segments_are_rows_of_their_own():
    call = LAWS.call(13)
    start = jnp.arange(13) == 6
    whole = selective_scan(**call.arrays, starts=jnp.broadcast_to(start, (B, 13)))
    arrays = {k: x[:, 6:] if k in LAWS.timed else x for k, x in call.arrays.items()}
    alone = selective_scan(**(arrays | {"initial": None}))
    assert_values_close((whole.y[:, 6:], whole.final), tuple(alone))


def test_gradients_are_finite_differences():
    with jax.enable_x64(True):
        call = LAWS.call(5, dtype="float64", starts=True)

        @jax.jit
        def total(arrays):
            out = selective_scan(**arrays, **(call.rest | {"chunk": 2}))
            return jnp.sum(jnp.sin(out.y)) + jnp.sum(jnp.cos(out.final))

        jax.test_util.check_grads(
            # Differences of exp(s A) at A down to -5 are themselves good to 3e-6.
            *(total, (call.arrays,)),
            order=1,
            modes=["rev"],
            rtol=1e-5,
        )


def test_float64_is_exact_over_a_long_row():
    with jax.enable_x64(True):
        call = LAWS.call(2048, dtype="float64")
        want = jax.jit(lambda arrays: selective_scan_reference(**arrays))(call.arrays)
        got = jax.jit(lambda arrays: selective_scan(**arrays))(call.arrays)
        want = api.SelectiveScanOutputs(*want)
        assert_values_close(got, want, "float64")
        narrow = jax.tree.map(lambda x: x.astype("float32"), call.arrays)
        got = jax.jit(lambda arrays: selective_scan(**arrays))(narrow)
        assert_values_close(got, want)


def test_the_gradient_keeps_a_state_every_chunk_and_no_more():
    """No array of T x N x I elements, nor one between that and the kept states."""
    T, wide, states = 1024, 8, 16
    arrays = {
        **dict.fromkeys(("u", "dt", "z"), jnp.zeros((1, T, wide))),
        **dict.fromkeys(("b", "c"), jnp.zeros((1, T, states))),
        "a": jnp.zeros((wide, states)),
    }

    def total(arrays):
        return jnp.sum(selective_scan(**arrays, chunk=CHUNK).y)

    program = jax.make_jaxpr(jax.grad(total))(arrays)
    assert max(sizes(program.jaxpr)) == T // CHUNK * wide * states


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "needs chunk of at least 1, got 0"),
        ({"u": jnp.zeros((B, 0, I))}, "none of them 0"),
        ({"dt": jnp.zeros((B, 7, I + 1))}, r"needs dt of shape \(2, 7, 16\), got"),
        ({"a": jnp.zeros((I + 1, N))}, "needs a of shape"),
        ({"b": jnp.zeros((B, 7, N + 1))}, "needs b of shape"),
        ({"c": jnp.zeros((B, 6, N))}, "needs c of shape"),
        ({"skip": jnp.zeros(N)}, "needs skip of shape"),
        ({"z": jnp.zeros((B, 7, N))}, "needs z of shape"),
        ({"dt_bias": jnp.zeros(N)}, "needs dt_bias of shape"),
        ({"initial": jnp.zeros((B, N, I))}, "needs initial of shape"),
        ({"starts": jnp.zeros((B, 6), bool)}, "needs starts of shape"),
        ({"lengths": jnp.zeros(3, int)}, "needs lengths of shape"),
        ({"u": jnp.zeros((B, 7, I), int)}, "needs floating u, got int32"),
        ({"a": jnp.zeros((I, N), int)}, "needs floating a, got int32"),
        ({"starts": jnp.full((B, 7), 2)}, "needs bool starts, got int32"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(change, message):
    unchecked = getattr(selective_scan, "__wrapped__", selective_scan)
    with pytest.raises(ValueError, match=message):
        unchecked(**(LAWS.call(7).arrays | change))


def test_the_op_runs_in_one_compiled_step_of_generation():
    call = LAWS.call(13)
    (whole,) = LAWS.outputs("xla", call)
    state, ys = call.arrays["initial"], []

    def one(arrays, state):
        return selective_scan(**(arrays | {"initial": state}))

    step = jax.jit(one, compiler_options=QUICK_COMPILE)
    for t in range(13):
        arrays = {
            k: x[:, t : t + 1] if k in LAWS.timed else x for k, x in call.arrays.items()
        }
        y, state = step(arrays, state)
        ys.append(y)
    assert_values_close(
        api.SelectiveScanOutputs(jnp.concatenate(ys, axis=1), state), whole
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": None}, "needs skip, z and dt_bias"),
        ({"u": jnp.zeros((B, 7, I), "float16")}, "got u of float16"),
        ({"a": jnp.zeros((24, N))}, "a multiple of 16, got 24"),
        ({"a": jnp.zeros((I, 12))}, "must be 1, 2, 4, 8, 16 or 32, got 12"),
        ({"chunk": 64}, "keeps a state every 32 positions at least, got 64"),
    ],
)
def test_what_the_gpu_kernels_cannot_do_is_refused_with_a_reason(change, message):
    call = LAWS.call(7)
    assert triton.expressible(op_call(call)) is None
    assert message in str(triton.expressible(op_call(call, **change)))


def launch(*, B, T, I, chunk=16, backward=False):
    """Returns how a call of these sizes is cut on a GPU."""
    shape = jax.ShapeDtypeStruct
    call = op_call(Call({"u": shape((B, T, I), "float32")}, {"chunk": chunk}))
    call = call._replace(a=shape((I, 16), "float32"))
    return triton.Launch.of(call, backward=backward)


def test_blocks_of_channels_divide_them():
    forward, backward = (launch(B=8, T=4096, I=2048, backward=b) for b in (False, True))
    assert (forward.channels, backward.channels) == (32, 64)
    odd = launch(B=8, T=4096, I=48, chunk=5, backward=True)
    assert (odd.channels, odd.unroll) == (16, 1)


def test_rows_are_cut_where_batch_and_channels_do_not_fill_the_device():
    assert launch(B=8, T=4096, I=2048).stretches == 1
    long = launch(B=1, T=65536, I=4096)
    assert long.programs == 9 * 128 and long.stretch % 16 == 0
    assert launch(B=1, T=1000, I=16).stretch == 336  # few programs, no short stretch
    assert launch(B=64, T=2**20, I=4096).stretch * 4096 < 2**31


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skip": None}, "needs skip, z and dt_bias"),
        ({"b": jnp.zeros((B, 7, N), "float16")}, "got b of float16"),
        ({"a": jnp.zeros((I, 4))}, "must be 8, 16, 24 or 32, got 4"),
        ({"chunk": 12}, "every 1, 2, 4, 8, 16 or 32 positions, got 12"),
    ],
)
def test_what_the_tpu_kernels_cannot_do_is_refused_with_a_reason(change, message):
    call = LAWS.call(7)
    assert mosaic_tpu.expressible(op_call(call)) is None
    assert message in str(mosaic_tpu.expressible(op_call(call, **change)))


@pytest.mark.sweep
def test_the_tpu_s_own_semantics_find_no_race(capfd):
    interpret = pltpu.InterpretParams(detect_races=True)
    backends = {"mosaic_tpu": (mosaic_tpu, {"interpret": interpret, "blocks": MOSAIC})}
    laws = TestLaws()
    laws.backends = backends
    call = laws.call(150, starts=True, chunk=16)
    got = laws.both_passes(call, "mosaic_tpu")
    want = laws.both_passes(call, None)
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])
    assert "RACE DETECTED" not in capfd.readouterr().out  # what it prints for one
