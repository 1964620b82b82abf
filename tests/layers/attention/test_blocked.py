"""Attention in blocks: the same numbers as attention at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.chunk_attention import xla_cuts
from pallas_kernels.target import Target, as_if
from recurjax.layers.attention import (
    AttentionConfig,
    Past,
    attend,
    attend_in_window,
    blocked,
    implementation,
    keys_for_queries,
)
from recurjax.layers.attention.blocked import (
    attend_as_chunks_of_one,
    attend_in_blocks,
)
from recurjax.plan.hlo import parse
from recurjax.plan.traffic import read_traffic
from recurjax.sharding import AXES, MeshConfig, make_mesh
from recurjax.types import Tokens
from recurjax.variants.rat import AttentionMixerConfig
from tests.compiling import QUICK_COMPILE, sizes
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.rat.switches import build, small

SHAPE = (2, 13, 4, 6)
H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
V5E = Target(platform="tpu", kind="TPU v5 lite")


@pytest.mark.parametrize("window", [None, 0, 3, 6, 12])
def test_blocks_change_nothing(window, monkeypatch):
    """Neither those of our own kernels, with documents, nor a window's."""
    monkeypatch.setattr(xla_cuts, "_TILE", 4)
    draw = np.random.default_rng(0)
    keys = (*SHAPE[:2], SHAPE[2] // 2, SHAPE[3])
    arrays = [
        jnp.asarray(draw.normal(size=shape), jnp.float32)
        for shape in (SHAPE, keys, keys)
    ]
    weights = draw.normal(size=SHAPE)
    documents = jnp.asarray(np.sort(draw.integers(3, size=SHAPE[:2]), axis=1))

    def both(attention):
        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        @partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
        def run(q, k, v):
            o = attention(q, k, v)
            return jnp.sum(o * weights), o

        (_, o), gradients = run(*arrays)
        return o, gradients

    def in_blocks(q, k, v):
        if window is None:
            return attend_as_chunks_of_one(q, k, v, scale=0.4, segments=documents)
        k, v = (keys_for_queries(x, SHAPE[2]) for x in (k, v))
        return in_two_parts(q, k, v, documents, scale=0.4, window=window)

    at_once = partial(
        attend,
        scale=0.4,
        causal=True,
        window=window,
        segments=documents,
        implementation="xla",
    )
    got, want = both(in_blocks), both(at_once)
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])


def in_two_parts(q, k, v, documents, *, scale, window):
    """Attends as two devices do that hold a row: the right one has the left's last."""
    cut, reach = max(window, 7), max(window, 1)
    nothing = np.zeros((SHAPE[0], reach), np.int32)
    nowhere = jnp.zeros((*nothing.shape, *k.shape[2:]))
    pasts = [
        Past(nowhere, nowhere, jnp.asarray(nothing), jnp.asarray(0)),
        Past(*(x[:, cut - reach : cut] for x in (k, v, documents)), jnp.asarray(cut)),
    ]
    cuts = [slice(0, cut), slice(cut, None)]
    parts = [
        attend_in_window(
            *(x[:, part] for x in (q, k, v)),
            scale=scale,
            window=window,
            documents=documents[:, part],
            past=past,
        )
        for part, past in zip(cuts, pasts, strict=True)
    ]
    return jnp.concatenate(parts, axis=1)


@pytest.mark.parametrize(
    ("length", "window", "served"),
    [(4095, None, "bands"), (4096, None, "tiles"), (4096, 64, "bands")],
)
def test_a_cpu_takes_tiles_for_long_rows_of_plain_attention(
    length, window, served, monkeypatch
):
    called = []

    def served_by(label, q, *_, **__):
        called.append(label)
        return q

    monkeypatch.setattr(blocked, "attend_in_bands", partial(served_by, "bands"))
    monkeypatch.setattr(blocked, "attend_as_chunks_of_one", partial(served_by, "tiles"))
    q = jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32)
    jax.eval_shape(partial(attend_in_blocks, scale=1.0, window=window), q, q, q)
    assert called == [served]


@pytest.mark.parametrize("target", [H100, V5E])
@pytest.mark.parametrize("T", [255, 256, 512])
def test_packed_rows_of_the_papers_length_keep_no_logits(target, T):
    """From 256 tokens on, where the kernels are ours, in neither pass."""
    H = 4
    q = jax.ShapeDtypeStruct((1, T, H, 64), jnp.bfloat16)
    documents = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def run(q, documents):
        attention = partial(attend, causal=True, scale=0.1, segments=documents)
        return jnp.sum(jax.value_and_grad(lambda q: attention(q, q, q).sum())(q)[1])

    with as_if(target):
        program = jax.make_jaxpr(run)(q, documents)
    assert (max(sizes(program.jaxpr)) < H * T * T) == (T >= 256)


@pytest.mark.parametrize("window", [None, 3])
def test_a_long_sequence_trains_as_a_short_one(window, monkeypatch):
    heads = AttentionConfig(heads=4, key_heads=2, head_width=4)
    model = build(small(AttentionMixerConfig(attention=heads, window=window)))
    ids = jnp.asarray(np.random.default_rng(1).integers(17, size=(2, 13)), jnp.int32)
    logits = []
    for threshold in (1024, 1):
        monkeypatch.setattr(implementation, "_BLOCKS_FROM_ON_CPU", threshold)

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        def run(model):
            return model(Tokens(ids), model.init_cache(2, 0))[0]

        logits.append(run(model))
    assert_values_close(logits[1], logits[0])
    assert np.any(np.asarray(logits[1] != logits[0]))  # the other path did run


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": jnp.ones((1, 1, 2, 2), bool)}, "dense mask or bias"),
        ({"causal": False}, "only causal"),
    ],
)
def test_blocks_by_name_run_or_say_why_not(options, reason):
    q = jnp.ones((1, 2, 1, 8))
    options = {"causal": True, "scale": 1.0, "implementation": "blocks"} | options
    with pytest.raises(NotImplementedError, match=f"attend: blocks: .*{reason}"):
        attend(q, q, q, **options)


def test_any_model_s_long_sequences_are_cut_into_blocks():
    """No array of T x T elements in the gradient of a long call."""
    shape = jax.ShapeDtypeStruct((1, 2048, 2, 8), jnp.float32)

    def total(q, k, v):
        return jnp.sum(attend(q, k, v, scale=1.0, causal=True))

    program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(shape, shape, shape)
    assert 0 < max(sizes(program.jaxpr)) < 2048 * 2048


@pytest.mark.parametrize("window", [None, 20])
def test_devices_attend_to_their_own_rows_without_a_word(window, monkeypatch):
    monkeypatch.setattr(xla_cuts, "_TILE", 16)  # Loops over heads and tiles of them.
    mesh = make_mesh(MeshConfig(data=2, fsdp=2), jax.devices()[:4])
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    x = jax.ShapeDtypeStruct((4, 64, 2, 8), "float32", sharding=rows)

    def passes(q, k, v, for_o):
        attention = partial(attend_in_blocks, scale=1.0, window=window)
        o, gradient = jax.vjp(attention, q, k, v)
        return o, gradient(for_o)

    with jax.set_mesh(mesh):
        lowered = jax.jit(passes, out_shardings=rows).lower(x, x, x, x)
    text = lowered.compile(compiler_options=QUICK_COMPILE).as_text()
    traffic = read_traffic(parse(text), axes=AXES, sizes=mesh.axis_sizes)
    assert [collective for collective in traffic.collectives if collective.sent] == []
