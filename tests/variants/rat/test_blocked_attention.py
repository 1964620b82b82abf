"""Attention in blocks: the same numbers as attention at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chunk_attention import tiles
from recurjax.layers.attention import attend
from recurjax.layers.self_attention import AttentionConfig
from recurjax.types import Tokens
from recurjax.variants.rat import AttentionMixerConfig, attention_mixer
from recurjax.variants.rat.blocked_attention import attend_in_blocks
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.rat.switches import build, small

SHAPE = (2, 13, 4, 6)


@pytest.mark.parametrize("window", [None, 0, 3, 6, 12])
def test_blocks_change_nothing(window, monkeypatch):
    monkeypatch.setattr(tiles, "_BAND_LOGITS", 400)
    monkeypatch.setattr(tiles, "_BLOCK_LOGITS", 300)
    draw = np.random.default_rng(0)
    arrays = [jnp.asarray(draw.normal(size=SHAPE), jnp.float32) for _ in range(3)]
    weights = draw.normal(size=SHAPE)

    def both(attention):
        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        @partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
        def run(q, k, v):
            o = attention(q, k, v, scale=0.4, window=window)
            return jnp.sum(o * weights), o

        (_, o), gradients = run(*arrays)
        return o, gradients

    got, want = both(attend_in_blocks), both(partial(attend, causal=True))
    assert_values_close(got[0], want[0])
    assert_gradients_close(got[1], want[1])


@pytest.mark.parametrize("window", [None, 3])
def test_a_long_sequence_trains_as_a_short_one(window, monkeypatch):
    layer = AttentionConfig(heads=4, key_heads=2, head_width=4)
    model = build(small(AttentionMixerConfig(attention=layer, window=window)))
    ids = jnp.asarray(np.random.default_rng(1).integers(17, size=(2, 13)), jnp.int32)
    logits = []
    for threshold in (1024, 1):
        monkeypatch.setattr(attention_mixer, "_BLOCKS_FROM", threshold)

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        def run(model):
            return model(Tokens(ids), model.init_cache(2, 0))[0]

        logits.append(run(model))
    assert_values_close(logits[1], logits[0])
    assert np.any(np.asarray(logits[1] != logits[0]))  # the other path did run
