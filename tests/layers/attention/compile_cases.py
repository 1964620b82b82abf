"""Passes of attention, as shapes, for `tests/compile_target.py`."""

from functools import partial

import jax
import jax.numpy as jnp

from recurjax.layers.attention import attend, empty_key_value_cache
from recurjax.layers.attention.key_value_cache import (
    KeyValueCache,
    attend_to_cache,
    write,
)
from recurjax.layers.position import Alibi, alibi_slopes

HEADS, WIDTH, LENGTH = 16, 64, 8192


def training(*, segments=False, alibi=False, **options):
    """Returns the gradient of one row of 8192 tokens, and its arguments."""
    x = jax.ShapeDtypeStruct((1, LENGTH, HEADS, WIDTH), jnp.bfloat16)
    documents = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    if alibi:
        options["slopes"] = alibi_slopes(HEADS, Alibi())

    def total(q, k, v, documents):
        known = documents if segments else None
        o = attend(q, k, v, scale=0.125, causal=True, segments=known, **options)
        return jnp.sum(o.astype(jnp.float32) ** 2)

    return jax.grad(total, argnums=(0, 1, 2)), (x, x, x, documents)


packed_rows = partial(training, segments=True)
packed_rows_with_alibi = partial(training, segments=True, alibi=True)
capped_window = partial(training, window=1024, soft_cap=30.0)


def narrow_decoding():
    """Returns four tokens' way through six layers' caches, and its arguments."""
    L, B, S, K, E = 6, 32, 2048, 3, 64
    cache = jax.eval_shape(lambda: empty_key_value_cache(L, B, S, K, E, jnp.bfloat16))
    token = jax.ShapeDtypeStruct((B, 1, K, E), jnp.bfloat16)

    def layer(carry, number):
        x, cache = carry
        cache = cache._replace(layer=number)
        options = {"scale": 0.125, "window": None, "lengths": None}
        return attend_to_cache(x, x, x, cache, **options), None

    def one(_, carry):
        x, cache = jax.lax.scan(layer, carry, jnp.arange(L))[0]
        return x, cache._replace(position=cache.position + 1)

    def several(keys, values, x):
        begun = cache._replace(
            keys=keys,
            values=values,
            position=jnp.zeros(B, jnp.int32),
            layer=jnp.zeros((), jnp.int32),
        )
        x, ended = jax.lax.fori_loop(0, 4, one, (x, begun))
        return x, ended.keys, ended.values

    return several, (cache.keys, cache.values, token)


def narrow_prompt():
    """Returns a write of 512 tokens per row to the same caches, and its arguments."""
    _, (keys, values, token) = narrow_decoding()
    B, _, K, E = token.shape
    prompt = jax.ShapeDtypeStruct((B, 512, K, E), token.dtype)

    def layer(carry, number):
        x, cache = carry
        cache = write(cache._replace(layer=number), x, x, None)
        return (x + cache.values[number, :, :512], cache), None

    def read(keys, values, position, x):
        number = jnp.zeros((), jnp.int32)
        cache = KeyValueCache(keys, values, position, number)
        (x, cache), _ = jax.lax.scan(layer, (x, cache), jnp.arange(keys.shape[0]))
        return x, cache.keys, cache.values

    position = jax.ShapeDtypeStruct((B,), jnp.int32)
    return read, (keys, values, position, prompt)
