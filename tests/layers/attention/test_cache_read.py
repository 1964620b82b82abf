"""Attention of one token to a cache by the C++ kernel, against numpy's in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu
from pallas_kernels.cpu.cache_read import attend, serves
from pallas_kernels.target import Target, as_if
from recurjax.layers.attention import KeyValueCache, attend_to_cache
from recurjax.sharding import MeshConfig, make_mesh
from tests.layers.attention.test_cpu import WIDTHS, needs_kernels
from tests.tolerances import assert_gradients_close, assert_values_close

pytestmark = needs_kernels
L, B = 2, 3
CASES = {
    "full": {"slots": 40, "newest": (0, 17, 39)},
    "nothing_read_yet": {"slots": 9, "newest": (-1, 0, 8)},
    "ring": {"slots": 13, "newest": (12, 13, 70)},
    "ring_of_a_window": {"slots": 21, "newest": (3, 20, 45), "window": 20},
    "window_within": {"slots": 64, "newest": (5, 30, 63), "window": 7},
    "one_query_head": {"slots": 19, "newest": (1, 5, 18), "heads": (1, 1)},
    "no_vector": {"slots": 19, "newest": (1, 5, 18), "width": 6, "heads": (6, 3)},
    "shared_out": {"slots": 700, "newest": (699, 300, 698), "width": 80},
}


def draw(*, slots, newest, window=None, heads=(4, 2), width=16, dtype="float32"):
    """Returns the kernel's arrays and options."""
    draws = np.random.default_rng(slots)
    H, K = heads
    shapes = (B, H, width), *[(L, B, slots, K, width)] * 2
    q, keys, values = (jnp.asarray(draws.normal(size=s), dtype) for s in shapes)
    arrays = q.astype("float32"), keys, values, jnp.int32(1), jnp.asarray(newest)
    return arrays, {"scale": 0.3, "window": window}


def oracle(q, keys, values, layer, newest, *, scale, window):
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    S, K = keys.shape[2:4]
    o = np.zeros_like(q)
    for b, h in np.ndindex(*q.shape[:2]):
        last = int(newest[b])
        reach = S - 1 if window is None else min(window, S - 1)
        seen = [p % S for p in range(max(0, last - reach), last + 1)]
        k = h // (q.shape[1] // K)
        logits = scale * keys[layer, b, seen, k] @ q[b, h]
        p = np.exp(logits - logits.max(initial=-np.inf))
        o[b, h] = p @ values[layer, b, seen, k] / max(p.sum(), 1e-30)
    return o


@pytest.mark.parametrize("lanes", WIDTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_it_sees_what_a_row_has_read(case, dtype, lanes, monkeypatch):
    if lanes is not None:
        monkeypatch.setattr(cpu, "lanes", lambda: lanes)
    arrays, options = draw(**CASES[case], dtype=dtype)
    assert_values_close(attend(*arrays, **options), oracle(*arrays, **options))


@pytest.mark.parametrize("case", ["full", "ring_of_a_window"])
def test_a_decode_step_calls_it_and_has_its_gradients(case, monkeypatch):
    arrays, options = draw(**CASES[case])
    q, keys, values, layer, newest = arrays
    new = jnp.ones((2, B, 1, *keys.shape[3:]))

    def step(q, k, v, keys, values):
        cache = KeyValueCache(keys, values, newest, layer)
        rest = {"lengths": None, **options}
        return attend_to_cache(q[:, None], k, v, cache, **rest)[0]

    inputs = q, *new, keys, values

    def loss(*inputs):
        return jnp.sum(step(*inputs) ** 2)

    gradient = partial(jax.grad, argnums=tuple(range(5)))
    assert "recurjax_cache_read" in str(jax.make_jaxpr(step)(*inputs))
    got, gradients = step(*inputs), gradient(loss)(*inputs)
    module = "recurjax.layers.attention.key_value_cache.cache_read.serves"
    monkeypatch.setattr(module, lambda dtype: False)
    assert_values_close(got, step(*inputs))
    assert_gradients_close(gradients, gradient(loss)(*inputs))


def test_it_knows_vmap():
    arrays, options = draw(**CASES["ring"])
    q, *stored, newest = arrays
    newest = jnp.stack([newest, newest - 5])
    got = jax.vmap(lambda newest: attend(q, *stored, newest, **options))(newest)
    assert_values_close(got[1], attend(q, *stored, newest[1], **options))


def test_what_it_leaves_to_xla():
    assert serves(jnp.float32) and serves(jnp.bfloat16)
    assert not serves(jnp.float16)
    with jax.set_mesh(make_mesh(MeshConfig(data=4, tensor=2))):
        assert not serves(jnp.float32)
    with as_if(Target(platform="tpu", kind="TPU v5e")):
        assert not serves(jnp.float32)
