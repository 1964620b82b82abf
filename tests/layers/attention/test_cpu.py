"""The C++ kernels for CPUs against a loop over queries in float64."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import cpu
from pallas_kernels.target import Target, as_if
from recurjax.layers.attention import attend
from recurjax.layers.position import Alibi, alibi_slopes
from recurjax.sharding import MeshConfig, make_mesh
from tests.compiling import QUICK_COMPILE
from tests.layers.attention.attention_oracle import attention_oracle
from tests.source_tree import ROOT
from tests.tolerances import assert_gradients_close, assert_values_close

B, H, K, E = 2, 4, 2, 16
needs_kernels = pytest.mark.skipif(
    cpu.refusal() is not None, reason=f"C++ kernels: {cpu.refusal()}"
)
CASES = {
    "one_token": {"T": 1},
    "part_of_a_tile": {"T": 13, "segments": True, "slopes": True, "window": 3},
    "a_tile": {"T": 64},
    "a_tile_and_a_token": {"T": 65, "heads": (4, 4)},
    "heads_of_no_vector": {"T": 67, "width": 6},
    "heads_of_a_vector_and_more": {"T": 67, "width": 27, "slopes": True},
    "heads_of_several_vectors": {"T": 70, "width": 80, "heads": (2, 1)},
    "the_widest_heads": {"T": 70, "width": 256, "heads": (1, 1)},
    "packed_rows": {"T": 150, "segments": True},
    "documents_in_any_order": {"T": 131, "segments": "random"},
    "window_of_itself": {"T": 131, "window": 0},
    "window_within_a_tile": {"T": 200, "window": 40},
    "window_over_tiles": {"T": 260, "window": 100, "slopes": True, "heads": (4, 1)},
    "all_of_it": {"T": 193, "window": 90, "segments": True, "slopes": True},
}
NARROW = ["one_token", "heads_of_a_vector_and_more", "all_of_it"]
WIDTHS = [16, 8] if cpu.refusal() is None and cpu.lanes() == 16 else [None]
"""Lanes of vectors: those of AVX2 are tried where there is AVX-512, too."""


def make(*, T, heads=(H, K), width=E, segments=False, slopes=False, window=None, dtype):
    """Draws q, k, v and o's gradient; returns them, the options and the oracle's."""
    draw = np.random.default_rng(T)
    shapes = [(B, T, heads[0], width), *[(B, T, heads[1], width)] * 2]
    arrays = [jnp.asarray(2 * draw.normal(size=shape), dtype) for shape in shapes]
    g = draw.normal(size=shapes[0]).astype(np.float32)
    distance = np.arange(T)[:, None] - np.arange(T)
    visible = np.broadcast_to(distance >= 0, (B, heads[0], T, T))
    options, bias = {"scale": 0.3, "causal": True}, None
    if window is not None:
        visible = visible & (distance <= window)
        options["window"] = window
    if segments:
        documents = draw.integers(3, size=(B, T))
        if segments != "random":
            documents = np.sort(documents, axis=1)
        same = documents[:, :, None] == documents[:, None]
        visible = visible & same[:, None]
        options["segments"] = jnp.asarray(documents)
    if slopes:
        options["slopes"] = alibi_slopes(heads[0], Alibi())
        of_head = options["slopes"][:, None, None]
        bias = np.broadcast_to(-of_head * distance, visible.shape)
    oracle = {"scale": 0.3, "visible": visible, "bias": bias}
    return (*arrays, g), options, oracle


def passes(implementation, options):
    """Returns the function of o and the gradients of sum(o * g)."""

    def run(q, k, v, g):
        def total(q, k, v):
            o = attend(q, k, v, implementation=implementation, **options)
            return jnp.sum(o.astype(jnp.float32) * g), o

        (_, o), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v)
        return o, gradients

    return run


def both(implementation, options):
    """Compiles them."""
    return jax.jit(passes(implementation, options), compiler_options=QUICK_COMPILE)


@needs_kernels
@pytest.mark.parametrize("lanes", WIDTHS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES] + [(case, "bfloat16") for case in NARROW],
)
def test_values_and_gradients_equal_the_loop(case, dtype, lanes, monkeypatch):
    if lanes is not None:
        monkeypatch.setattr(cpu, "lanes", lambda: lanes)
    arrays, options, oracle = make(dtype=dtype, **CASES[case])
    o, gradients = both("cpu", options)(*arrays)
    want_o, want = attention_oracle(*arrays, **oracle)
    assert o.dtype == jnp.dtype(dtype)
    assert_values_close(o, want_o, dtype)
    assert_gradients_close(gradients, tuple(want[name] for name in "qkv"), dtype)


@needs_kernels
def test_a_future_of_any_size_changes_no_bit_of_the_past():
    (q, k, v, _), options, _ = make(T=150, dtype="float32")
    run = jax.jit(partial(attend, implementation="cpu", **options))
    before = np.asarray(run(q, k, v))
    changed = (x.at[:, 70:].multiply(1e20) for x in (q, k, v))
    np.testing.assert_array_equal(np.asarray(run(*changed))[:, :70], before[:, :70])


@needs_kernels
def test_logits_of_any_size_stay_finite_and_a_nan_stays_one():
    @jax.jit
    @jax.value_and_grad
    def run(q):
        options = {"scale": 1.0, "causal": True, "implementation": "cpu"}
        return jnp.sum(attend(q, q, q, **options))

    q = np.full((1, 70, 1, 8), 1e4, np.float32)
    value, gradient = run(q)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))
    q[0, 3] = np.nan
    assert np.isnan(run(q)[0])


@needs_kernels
def test_repeated_calls_agree_in_every_bit():
    arrays, options, _ = make(dtype="float32", **CASES["all_of_it"])
    run = both("cpu", options)
    first = jax.tree.map(np.asarray, run(*arrays))
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(*arrays), first)


@needs_kernels
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, 0)])
def test_vmap_equals_a_loop(axes):
    arrays, options, _ = make(dtype="float32", **CASES["all_of_it"])
    draw = np.random.default_rng(1)
    arrays = [
        x if axis is None else jnp.asarray(draw.normal(size=(3, *x.shape)), x.dtype)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    run = both("cpu", options)
    got = jax.vmap(run, axes)(*arrays)
    for n in range(3):
        pick = (x if a is None else x[n] for x, a in zip(arrays, axes, strict=True))
        want = run(*pick)
        assert_values_close(got[0][n], want[0])
        assert_gradients_close(tuple(x[n] for x in got[1]), want[1])


@needs_kernels
def test_devices_run_the_kernels_on_their_own_rows_and_heads():
    arrays, options, _ = make(dtype="float32", **CASES["all_of_it"])
    want = both("cpu", options)(*arrays)
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    place = partial(
        jax.device_put, device=NamedSharding(mesh, P("data", None, "tensor"))
    )
    with jax.set_mesh(mesh):
        run = both("cpu", options)
        got = run(*map(place, arrays))
        text = run.lower(*map(place, arrays)).compile().as_text()
    assert "f32[1,193,2,16]" in text and "recurjax_attention_backward" in text
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])


def test_a_mesh_that_does_not_divide_the_call_leaves_it_to_xla():
    arrays, options, _ = make(T=70, heads=(3, 3), dtype="float32")
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(passes(None, options))(*arrays)
        with pytest.raises(NotImplementedError, match="attend: cpu: "):
            both("cpu", options)(*arrays)
    assert "ffi_call" not in str(program)


@needs_kernels
@pytest.mark.parametrize(
    ("case", "dtype", "taken"),
    [
        ({"T": 64}, "float32", True),
        ({"T": 64, "segments": True, "slopes": True, "window": 9}, "bfloat16", True),
        ({"T": 63}, "float32", False),
        ({"T": 64}, "float16", False),
        ({"T": 64, "width": 257}, "float32", False),
    ],
)
def test_a_cpu_takes_the_kernels_from_a_tile_on(case, dtype, taken):
    arrays, options, _ = make(dtype=dtype, **case)
    program = jax.make_jaxpr(passes(None, options))(*arrays)
    assert ("ffi_call" in str(program)) == taken
    capped = passes(None, options | {"soft_cap": 3.0})
    assert "ffi_call" not in str(jax.make_jaxpr(capped)(*arrays))


@pytest.mark.parametrize(
    "target",
    [
        Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", compute_capability="9.0"),
        Target(platform="tpu", kind="TPU v5 lite"),
        Target(platform="cpu", kind="cpu"),
    ],
)
def test_a_program_for_an_absent_device_calls_no_code_of_this_machine(target):
    arrays, options, _ = make(T=256, dtype="float32")
    with as_if(target):
        program = jax.make_jaxpr(passes(None, options))(*arrays)
        with pytest.raises(NotImplementedError, match="absent device"):
            jax.make_jaxpr(passes("cpu", options))(*arrays)
    assert "ffi_call" not in str(program)


@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({"mask": jnp.ones((1, 1, 2, 2), bool)}, "float32", "dense mask or bias"),
        ({"causal": False}, "float32", "only causal"),
        ({"soft_cap": 1.0}, "float32", "soft cap"),
        ({}, "float16", "dtype must be float32 or bfloat16, got float16"),
        ({"width": 300}, "float32", "head width must be at most 256, got 300"),
        ({"of_keys": "bfloat16"}, "float32", "q, k and v of one dtype"),
    ],
)
def test_the_kernels_by_name_run_or_say_why_not(options, dtype, reason):
    options = {"causal": True, "scale": 1.0, "implementation": "cpu"} | options
    q = jnp.ones((1, 2, 1, options.pop("width", 8)), dtype)
    k = q.astype(options.pop("of_keys", dtype))
    with pytest.raises(NotImplementedError, match=f"attend: cpu: .*{reason}"):
        attend(q, k, k, **options)


@pytest.mark.parametrize("reason", ["not built", "do not load"])
def test_without_the_library_attention_is_xla_s(reason, monkeypatch, tmp_path):
    file = tmp_path / "no_library.so"
    file.write_bytes(b"not one")
    monkeypatch.setattr(cpu, "_file", lambda: None if "built" in reason else str(file))
    monkeypatch.setattr(cpu, "_library", cpu._library.__wrapped__)
    arrays, options, oracle = make(T=70, dtype="float32")
    o, _ = both(None, options)(*arrays)
    assert_values_close(o, attention_oracle(*arrays, **oracle)[0])
    with pytest.raises(NotImplementedError, match=f"attend: cpu: .*{reason}"):
        attend(*arrays[:3], implementation="cpu", **options)


@needs_kernels
def test_several_threads_share_the_keys_of_one_head():
    """In a process of its own, because XLA counts its threads once."""
    code = """
import jax, jax.numpy as jnp, numpy as np
from tests.layers.attention.test_cpu import both, make
from tests.tolerances import assert_gradients_close, assert_values_close
for window in (None, 100):
    arrays, options, _ = make(T=400, heads=(2, 1), window=window, dtype="float32")
    arrays = [x[:1] for x in arrays]
    got, want = (both(name, options)(*arrays) for name in ("cpu", "xla"))
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, both("cpu", options)(*arrays), got)
"""
    environment = {**os.environ, "NPROC": "4", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=True)
