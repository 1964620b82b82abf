"""The reversed design, its gates and its rotation against loops in plain numpy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.initialization import InitConfig
from recurjax.layers.position import Rope
from recurjax.types import Tokens
from recurjax.variants.rat.config import ReversedRatMixerConfig, gate_bias_span
from recurjax.variants.rat.mixers import Gate, ReversedRatCache, ReversedRatMixer
from tests.tolerances import assert_values_close

BATCH, LENGTH, WIDTH, HEADS, HEAD_WIDTH, GROUPS = 2, 10, 12, 4, 6, 2
BASE = 50.0


@cache
def mixer(chunk: int) -> ReversedRatMixer:
    """Gates of low rank (3 and 2), queries of two groups, all weights drawn large."""
    config = ReversedRatMixerConfig(
        heads=HEADS,
        head_width=HEAD_WIDTH,
        chunk=chunk,
        groups=GROUPS,
        gate_horizon=9,
        position=Rope(base=BASE),
        forget_rank=3,
        output_rank=2,
    )
    result = ReversedRatMixer(
        config, WIDTH, InitConfig(std=0.4), layer=0, layers=1, rngs=nnx.Rngs(0)
    )
    draw = np.random.default_rng(1).normal
    return jax.tree.map(
        lambda w: jnp.asarray(draw(size=w.shape), jnp.float32) * 0.5, result
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gate_of(gate: Gate, x):
    """sigmoid(x W_reduce W_expand + b), [H, E]."""
    low = x @ np.asarray(gate.w_reduce[...], np.float64)
    logits = np.einsum("r,rhe->he", low, np.asarray(gate.w_expand[...], np.float64))
    bias = 0 if gate.b_forget is None else np.asarray(gate.b_forget[...], np.float64)
    return sigmoid(logits + bias)


def rotated(vector, position):
    """Pairs (i, i + E/2) turn by position * base^(-2 i / E)."""
    half = HEAD_WIDTH // 2
    turned = vector.copy()
    for i in range(half):
        angle = position * BASE ** (-2 * i / HEAD_WIDTH)
        a, b = vector[..., i], vector[..., i + half]
        turned[..., i] = a * np.cos(angle) - b * np.sin(angle)
        turned[..., i + half] = b * np.cos(angle) + a * np.sin(angle)
    return turned


def by_loops(module: ReversedRatMixer, x, chunk: int):
    """One row: a_t attends within its chunk, v~_t mixes it with the chunk before."""
    w_q, w_k, w_v, w_out = (
        np.asarray(w[...], np.float64)
        for w in (module.w_q, module.w_k, module.w_v, module.w_out)
    )
    keys, values, rows = [], [], []
    end = np.zeros((HEADS, HEAD_WIDTH))
    state = end
    for t, token in enumerate(x):
        if t % chunk == 0:
            keys, values, end = [], [], state
        q = rotated(np.einsum("d,dne->ne", token, w_q), t)
        keys.append(rotated(np.einsum("d,dhe->he", token, w_k), t))
        values.append(np.einsum("d,dhe->he", token, w_v))
        attended = np.zeros((HEADS, HEAD_WIDTH))
        for head in range(HEADS):
            logits = [q[head % GROUPS] @ k[head] / HEAD_WIDTH**0.5 for k in keys]
            p = np.exp(np.array(logits) - max(logits))
            for share, value in zip(p / p.sum(), values, strict=True):
                attended[head] += share * value[head]
        g = gate_of(module.forget_gate, token)
        state = g * end + (1 - g) * attended
        mixed = gate_of(module.output_gate, token) * state
        rows.append(np.einsum("he,hed->d", mixed, w_out))
    return np.stack(rows)


@pytest.mark.parametrize("chunk", [1, 4, LENGTH])
def test_the_reversed_design_is_its_loops(chunk):
    """Chunk 1 is the RNN; chunk T attention, whose output the gate scales."""
    module = mixer(chunk)
    x = np.random.default_rng(2).normal(size=(BATCH, LENGTH, WIDTH))

    @jax.jit
    def run(module, x):
        cache: ReversedRatCache = module.init_cache(1, BATCH, 0, x.dtype)
        ids = jnp.zeros(x.shape[:2], jnp.int32)
        return module(x, cache, Tokens(ids))[0]

    got = run(module, jnp.asarray(x, jnp.float32))
    want = np.stack([by_loops(module, row, chunk) for row in x])
    assert_values_close(got, want.astype(np.float32))


def test_a_fresh_forget_gate_looks_back_up_to_its_horizon():
    """b = log U(1, h - 1): a gate of 1 - 1 / (1 + U) forgets in 1 + U tokens."""
    rngs = nnx.Rngs(0)
    result = Gate(4, 64, 64, InitConfig(), rank=None, horizon=17, rngs=rngs)
    assert result.b_forget is not None
    spans = 1 + np.exp(np.asarray(result.b_forget[...], np.float64))
    assert 2 <= spans.min() < 2.1 and 16.9 < spans.max() <= 17 + 1e-4
    np.testing.assert_allclose(spans.mean(), (2 + 17) / 2, rtol=0.02)
    assert gate_bias_span(1) == 0.0


@pytest.mark.parametrize("which", ["forget_gate", "output_gate"])
def test_only_the_forget_gate_has_a_bias(which):
    bias = getattr(mixer(4), which).b_forget
    assert (bias is not None) == (which == "forget_gate")
