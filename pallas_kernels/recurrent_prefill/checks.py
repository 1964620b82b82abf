"""What the op accepts: every refusal names the function, the wish and the value."""

from typing import get_args

import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerWeights,
    RecurrentCache,
    Rows,
)
from pallas_kernels.recurrent_prefill.spec import LayerSpec, Schedule


def check_call(
    x: Array,
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    *,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
) -> None:
    """Raises ValueError or NotImplementedError when a call makes no sense."""
    if x.ndim != 3 or x.shape[1] < 1:
        raise ValueError(_wants(f"x of shape [B, T >= 1, D], got {x.shape}"))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(_wants(f"a floating x, got {x.dtype}"))
    _check_weights(x.shape[2], weights, spec)
    _check_cache(x, weights, cache, spec)
    _check_rows(x, cache, rows)
    if schedule not in (None, *get_args(Schedule)):
        raise ValueError(
            _wants(f"a schedule of {list(get_args(Schedule))}, got {schedule!r}")
        )
    if tile is not None and tile < 1:
        raise ValueError(_wants(f"tile of at least 1 position, got {tile}"))
    if tile is not None and schedule == "naive":
        raise ValueError(_wants(f'no tile with schedule "naive", got {tile}'))
    if tile is not None and tile % spec.block:
        raise ValueError(
            _wants(f"tile to be a multiple of spec.block={spec.block}, got {tile}")
        )


def _check_weights(width: int, weights: LayerWeights, spec: LayerSpec) -> None:
    L, F = weights.w_up.shape[0], weights.w_up.shape[-1]
    H, K, E = spec.heads, spec.key_heads, spec.head_width
    shapes = {
        "w_q": (width, H, E),
        "w_k": (width, K, E),
        "w_v": (width, K, E),
        "w_out": (H, E, width),
        "w_up": (width, F),
        "w_gate": (width, F),
        "w_down": (F, width),
        "q_norm_scale": (H * E,),
        "q_norm_bias": (H * E,),
        "k_norm_scale": (K * E,),
        "k_norm_bias": (K * E,),
        "b_q": (H, E),
        "b_k": (K, E),
        "b_v": (K, E),
        "b_up": (F,),
        "b_gate": (F,),
    }
    for name, leaf in weights._asdict().items():
        shape = (L, *shapes.get(name, (width,)))
        if leaf is not None and leaf.shape != shape:
            raise ValueError(_wants(f"weights.{name} of shape {shape}: {leaf.shape}"))


def _check_cache(
    x: Array, weights: LayerWeights, cache: RecurrentCache, spec: LayerSpec
) -> None:
    (B, T), L = x.shape[:2], weights.w_q.shape[0]
    S = cache.keys.shape[2]
    open_slots = spec.block - 1 if S else 0
    wanted = {
        "keys": (L, B, S, spec.key_heads, spec.head_width),
        "temporary_keys": (L, B, open_slots, spec.key_heads, spec.head_width),
        "position": (B,),
    }
    wanted["values"] = wanted["keys"]
    wanted["temporary_values"] = wanted["temporary_keys"]
    for name, shape in wanted.items():
        got = getattr(cache, name).shape
        if got != shape:
            raise ValueError(
                _wants(f"cache.{name} of shape {shape} for this x and spec, got {got}")
            )
    if S and T > S:
        raise ValueError(
            _wants(f"at most as many positions as the cache has slots, {S}, got {T}")
        )


def _check_rows(x: Array, cache: RecurrentCache, rows: Rows) -> None:
    B, T = x.shape[:2]
    if rows.lengths is not None and rows.lengths.shape != (B,):
        raise ValueError(_wants(f"lengths of shape {(B,)}, got {rows.lengths.shape}"))
    if rows.segments is not None and rows.segments.shape != (B, T):
        raise ValueError(
            _wants(f"segments of shape {(B, T)}, got {rows.segments.shape}")
        )
    if rows.segments is not None and cache.slots:
        raise NotImplementedError(
            "recurrent_prefill: segments are for the training cache (length 0) only"
        )


def _wants(what: str) -> str:
    return f"recurrent_prefill: wants {what}"
