"""Training passes of attention, as shapes, for `tests/compile_target.py`."""

from functools import partial

import jax
import jax.numpy as jnp

from recurjax.layers.attention import attend
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
