"""What the stack's laws do not show of the attention layer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.attention import (
    AttentionConfig,
    SelfAttention,
    empty_key_value_cache,
)
from recurjax.layers.initialization import InitConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Alibi, Rope, rotate
from recurjax.parameters import to_nested_dict
from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE
from tests.layers.attention.attention_oracle import attention_oracle
from tests.tolerances import assert_values_close

B, T, D, H, K, E = 2, 5, 6, 4, 2, 8
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
TOKENS = Tokens(ids=np.zeros((B, T), np.int32))


def layer(window=None, **options):
    config = AttentionConfig(heads=H, key_heads=K, head_width=E, **options)
    like = jax.eval_shape(
        lambda: SelfAttention(
            config, D, InitConfig(), window=window, layer=0, layers=1, rngs=nnx.Rngs(0)
        )
    )
    draw = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.float32(draw.normal(size=leaf.shape) / 2), like
    )


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def run(attention, x):
    cache = empty_key_value_cache(1, B, 0, K, E, x.dtype)
    return attention(x, cache, TOKENS)[0]


@pytest.mark.parametrize("over", ["head", "full"])
def test_the_layer_is_its_equation(over):
    """Projections, norm over a head or all of them, rotation, scale, output."""
    attention = layer(
        qk_norm=NormConfig(eps=0.1),
        qk_norm_over=over,
        qkv_bias=True,
        out_bias=True,
        scale=0.9,
        position=Rope(base=50.0),
    )
    w = jax.tree.map(np.float64, to_nested_dict(attention))
    heads = {}
    for name in "qkv":
        y = np.einsum("btd,dhe->bthe", X, w[f"w_{name}"]) + w[f"b_{name}"]
        if name != "v":
            flat = y if over == "head" else y.reshape(B, T, -1)
            flat = flat / np.sqrt(np.mean(flat**2, axis=-1, keepdims=True) + 0.1)
            y = (flat * w[f"{name}_norm"]["scale"]).reshape(y.shape)
            y = rotate(jnp.float32(y), jnp.arange(T)[None], Rope(base=50.0))
        heads[name] = y
    visible = np.tril(np.ones((B, H, T, T), bool))
    o, _ = attention_oracle(
        *heads.values(), np.zeros((B, T, H, E)), scale=0.9, visible=visible
    )
    want = np.einsum("bthe,hed->btd", o, w["w_out"]) + w["b_out"]
    assert_values_close(run(attention, X), want)


def test_the_scale_defaults_to_one_over_the_root_of_the_head_width():
    assert_values_close(run(layer(), X), run(layer(scale=E**-0.5), X))


def test_cudnn_by_name_is_asked_for_in_training_only():
    attention = layer(implementation="cudnn")
    with pytest.raises(NotImplementedError, match="cudnn"):
        jax.eval_shape(run, attention, X)
    cache = empty_key_value_cache(1, B, T, K, E, jnp.float32)
    jax.eval_shape(attention, jnp.asarray(X), cache, TOKENS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, r"AttentionConfig\.heads: must be >= 1, got 0"),
        ({"key_heads": 3}, "key_heads must divide heads, got 3 and 4"),
        ({"soft_cap": 0.0}, r"AttentionConfig\.soft_cap: must be > 0, got 0.0"),
        ({"head_width": 7}, "even number of dimensions"),
    ],
)
def test_a_wrong_config_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**{"heads": H, "key_heads": K, "head_width": E, **options})


@pytest.mark.parametrize(
    ("window", "options"),
    [
        (None, {"position": Rope(base=50.0)}),
        (7, {"position": Alibi(), "soft_cap": 3.0}),
    ],
)
def test_a_prompt_from_the_first_position_on_is_read_as_one_in_two_pieces(
    window, options
):
    """Row 0 has no token in the first call, and row 1 less than it is long."""
    attention, length, first = layer(window, **options), 40, 20
    x = np.random.default_rng(2).normal(size=(3, length, D)).astype(np.float32)
    counts = np.array([0, 31, length])

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def call(cache, position, x, lengths):
        cache = cache._replace(position=position)
        ids = jnp.zeros(x.shape[:2], jnp.int32)
        return attention(x, cache, Tokens(ids, lengths=lengths))

    empty = empty_key_value_cache(1, 3, length, K, E, jnp.float32)
    # A row without tokens may be anywhere.
    begin = np.array([5, 0, 0])
    whole, cache = call(empty, begin, x, counts)
    head, part = call(empty, begin, x[:, :first], np.minimum(counts, first))
    rest = np.maximum(counts - first, 0)
    tail, cut = call(part, begin + counts - rest, x[:, first:], rest)
    pieces = np.concatenate([head, tail], axis=1)
    for row in (1, 2):
        real = slice(0, counts[row])
        assert_values_close(whole[row, real], pieces[row, real])
    assert_values_close(cache.keys, cut.keys)
    assert_values_close(cache.values, cut.values)
