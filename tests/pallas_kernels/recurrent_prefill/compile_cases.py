"""Calls at the paper's sizes, as shapes, for `tests/compile_target.py`."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.call import (
    LayerSpec,
    LayerWeights,
    RecurrentPrefillCall,
    RecurrentPrefillOptions,
    Rows,
    empty_cache,
)
from pallas_kernels.recurrent_prefill.mosaic_tpu import backend as mosaic_tpu
from pallas_kernels.recurrent_prefill.triton import backend as triton


def layer(
    backend,
    *,
    batch: int,
    positions: int,
    layers=1,
    schedule=None,
    train=False,
    heads=16,
    head_width=64,
    key_heads=None,
    gated=False,
    tile=None,
    dtype="bfloat16",
    slots=0,
    documents=False,
    rope_width=0,
):
    """Returns a function of x and weights, and its arguments: D = H E.

    Args:
      slots: of a cache that is an argument too; 0: the training cache.
      documents: whether rows have several, an argument too.
    """
    H, E, L = heads, head_width, layers
    K = H if key_heads is None else key_heads
    D, F = H * E, 4 * H * E
    spec = LayerSpec(
        heads=H,
        key_heads=K,
        head_width=E,
        alibi_max_bias=None if rope_width else 8.0,
        rope_base=1e4 if rope_width else None,
        rope_width=rope_width,
        logit_scale=E**-0.5,
        residual_scale=1.0,
        activation="silu" if gated else "gelu",
        dtype=dtype,
    )
    weights = LayerWeights(
        w_q=_shape(L, D, H, E),
        w_k=_shape(L, D, K, E),
        w_v=_shape(L, D, K, E),
        w_out=_shape(L, H, E, D),
        w_up=_shape(L, D, F),
        w_down=_shape(L, F, D),
        w_gate=_shape(L, D, F) if gated else None,
        attention_norm_scale=_shape(L, D),
        mlp_norm_scale=_shape(L, D),
        q_norm_scale=_shape(L, D),
        k_norm_scale=_shape(L, K * E),
    )
    options = RecurrentPrefillOptions(spec=spec, schedule=schedule, tile=tile)

    def run(x, weights, more):
        cache = more.get("cache", empty_cache(L, batch, 0, D, spec))
        rows = Rows(segments=more.get("segments"))
        call = RecurrentPrefillCall(x, weights, cache, rows, options)
        reason = backend.expressible(call)
        assert reason is None, reason
        (z, written), saved = backend.forward(call, residuals=train)
        if not train:
            return (z, written) if slots else z
        of = backend.backward(call, saved, (z, written))
        return z, (of.x, of.weights)

    more = {}
    if slots:
        more["cache"] = jax.eval_shape(lambda: empty_cache(L, batch, slots, D, spec))
    if documents:
        more["segments"] = jax.ShapeDtypeStruct((batch, positions), jnp.int32)
    return run, (_shape(batch, positions, D), weights, more)


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


gpu_forward = partial(layer, triton, batch=512, positions=512)
gpu_small_batch = partial(layer, triton, batch=32, positions=512)
gpu_wavefront = partial(
    layer, triton, batch=32, positions=512, layers=3, schedule="wavefront"
)
gpu_training = partial(layer, triton, batch=512, positions=512, train=True)
tpu_forward = partial(layer, mosaic_tpu, batch=8, positions=128)
tpu_large_batch = partial(layer, mosaic_tpu, batch=512, positions=512)
tpu_large_training = partial(layer, mosaic_tpu, batch=512, positions=512, train=True)
tpu_large_rotated = partial(tpu_large_training, rope_width=64)
tpu_large_documents = partial(tpu_large_training, documents=True)
tpu_long = partial(layer, mosaic_tpu, batch=128, positions=4096)
tpu_wide_training = partial(
    layer, mosaic_tpu, batch=32, positions=128, heads=32, train=True
)
tpu_training = partial(layer, mosaic_tpu, batch=8, positions=128, train=True)
tpu_narrow_training = partial(tpu_training, heads=8)
tpu_cache = partial(layer, mosaic_tpu, batch=8, positions=128, slots=512)
tpu_rotated = partial(tpu_training, heads=8, rope_width=64)
tpu_documents = partial(tpu_training, heads=8, documents=True)
tpu_heads_of_40 = partial(layer, mosaic_tpu, batch=8, positions=128, head_width=40)

GPU_CLASSES: dict[str, dict] = {
    "few rows": {"batch": 32},
    "rows": {"batch": 64},
    "many rows": {"batch": 512},
    "wide heads": {"batch": 512, "heads": 8, "head_width": 128},
    "few rows, wide heads": {"batch": 32, "heads": 8, "head_width": 128},
    "grouped heads": {"batch": 512, "key_heads": 4},
    "few rows, grouped heads": {"batch": 32, "key_heads": 4},
    "gate": {"batch": 512, "gated": True},
    "long tiles": {"batch": 512, "tile": 64},
    "few rows, long tiles": {"batch": 32, "tile": 64},
    "short tiles": {"batch": 512, "tile": 16},
    "wavefront": {"batch": 64, "layers": 3, "schedule": "wavefront"},
}
"""Shapes that between them ask for every choice of block sizes."""


def gpu_class(name: str, dtype: str):
    """Returns both passes of one of GPU_CLASSES."""
    sizes = {"positions": 128, "train": True} | GPU_CLASSES[name]
    return layer(triton, dtype=dtype, **sizes)
