"""Hopper path: one persistent kernel a tile, the layer's weights in shared memory.

Only the forward pass and only that loop: the prefix and the backward pass are those of
the Triton kernels, for which `forward` keeps what they read.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerSpec,
    LayerWeights,
    RecurrentCache,
    Residuals,
    Rows,
)
from pallas_kernels.recurrent_prefill.block_sizes import BlockSizes
from pallas_kernels.recurrent_prefill.equations import prepare
from pallas_kernels.recurrent_prefill.mesh_layout import ONE_STAGE, Stages
from pallas_kernels.recurrent_prefill.mosaic_gpu.launch import (
    SIDE,
    WORKERS,
    Launch,
    LayerWidths,
    choose_cut,
    refusal_of_widths,
)
from pallas_kernels.recurrent_prefill.triton import backend as triton
from pallas_kernels.recurrent_prefill.triton.forward import run_layers
from pallas_kernels.recurrent_prefill.triton.launch import Launch as PrefixLaunch
from pallas_kernels.recurrent_prefill.triton.tiles import ProductTiles
from pallas_kernels.target import (
    multiprocessors,
    refusal_of_mosaic_gpu,
    shared_memory_bytes,
)

_ROWS = 8
"""Rows come on chip by so many, as they lie there."""


def supported(*arrays: Any, stages: Stages = ONE_STAGE, **options: Any) -> str | None:
    """Returns why the kernel cannot run this call, None when it can."""
    if stages.count > 1:
        return "runs no layers on several stages"
    return refusal_of_mosaic_gpu() or expressible(*arrays, **options)


def expressible(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    *,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
    blocks: BlockSizes | None = None,
) -> str | None:
    """Returns what of a call the kernel does not do, whatever the device."""
    if blocks is not None and (reason := blocks.refusal_beyond()) is not None:
        return reason
    options = {"spec": spec, "schedule": schedule, "tile": tile}
    reason = triton.expressible(x, weights, cache, rows, **options)
    if reason is not None:
        return reason
    if cache.slots:
        return "starts at position 0 without a cache to fill"
    if schedule not in (None, "prefix"):
        return f'runs tiles of one layer: schedule "prefix", got {schedule!r}'
    if spec.dtype != "bfloat16":
        return f"multiplies bfloat16, got {spec.dtype}"
    if spec.key_heads != spec.heads:
        return f"needs as many key heads as heads, got {spec.key_heads}"
    if spec.head_width != SIDE:
        return f"runs heads of {SIDE}, got head_width={spec.head_width}"
    if weights.w_gate is not None:
        return "has no gate"
    if "layer" in (spec.norm, spec.qk_norm):
        return 'has the norms "rms" and "none", got "layer"'
    widths = _widths(x, weights, spec)
    return refusal_of_widths(
        widths, most=multiprocessors(), shared=shared_memory_bytes()
    )


def forward(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    *,
    residuals: bool,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
    blocks: BlockSizes | None = None,
    interpret: Any = False,
) -> tuple[Array, RecurrentCache, Residuals | None]:
    """Runs L layers, one after the other, from position 0.

    Args:
      interpret: False, or the parameters of jax's interpreter of Mosaic GPU kernels.
    """
    # Not above: only jaxlib for Linux has Mosaic GPU, and jax changes its module often.
    from pallas_kernels.recurrent_prefill.mosaic_gpu.forward import run_tile
    from pallas_kernels.recurrent_prefill.mosaic_gpu.refs import Resident

    B, T, _ = x.shape
    launch = _launch(_widths(x, weights, spec), spec, B, interpret)
    tiles = _prefix_tiles(tile, launch.blocks)
    prefix = PrefixLaunch(
        spec=spec,
        tiles=tiles,
        shared=shared_memory_bytes(),
        interpret=bool(interpret),
    )
    keys, values = tiles.cached_slots(cache, T, spec)
    start = tiles.start(cache)

    def layer(x, layer_s):
        w, wide, keys, values = jax.tree.map(lambda leaf: leaf[None], layer_s)
        run = partial(run_tile, launch, Resident.of(wide, spec, launch.cut))
        out = run_layers(prefix, x, w, keys, values, start, training=True, run_tile=run)
        last = out.z[-1]
        return last, (out.z[0], out.attended[0], out.lse[0]) if residuals else None

    last, kept = jax.lax.scan(
        layer,
        tiles.pad_rows(x.astype(jnp.float32).swapaxes(0, 1), batch=1),
        (prepare(weights, spec.dtype), prepare(weights, jnp.float32), keys, values),
    )
    z = last[:, :B].swapaxes(0, 1).astype(x.dtype)
    if kept is not None:
        kept_z, attended, lse = kept
        attended = attended[:, :, :B].swapaxes(1, 2)
        kept = Residuals(
            z=kept_z[:, :, :B].swapaxes(1, 2),
            attended=attended.reshape(*attended.shape[:3], -1, spec.head_width),
            lse=jnp.moveaxis(lse, 3, 1)[:, :B],
        )
    return z, cache, kept


def backward(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    residuals: Residuals,
    dz: Float[Array, "B T D"],
    dcache: RecurrentCache,
    *,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
    blocks: BlockSizes | None = None,
    interpret: Any = False,
) -> tuple[Array, LayerWeights, RecurrentCache]:
    """Returns the gradients of x, weights and cache, by the Triton kernels."""
    return triton.backward(
        *(x, weights, cache, rows, residuals, dz, dcache),
        spec=spec,
        schedule="prefix",
        tile=tile,
        blocks=blocks,
        interpret=bool(interpret),
    )


def _widths(x: Array, weights: LayerWeights, spec: LayerSpec) -> LayerWidths:
    return LayerWidths(x.shape[2], spec.heads * spec.head_width, weights.w_up.shape[2])


def _launch(widths: LayerWidths, spec: LayerSpec, batch: int, interpret: Any) -> Launch:
    cut = choose_cut(widths, most=multiprocessors(), shared=shared_memory_bytes())
    assert cut is not None, "supported refuses what does not fit"
    return Launch(
        spec=spec,
        cut=cut,
        blocks=-(-batch // SIDE),
        loaded=min(SIDE, -(-batch // _ROWS) * _ROWS),
        played=cut.programs if interpret else 1,
        workers=1 if interpret else WORKERS,
        interpret=interpret,
    )


def _prefix_tiles(tile: int | None, blocks: int) -> ProductTiles:
    """Returns sizes for the prefix's kernel, and for rows padded to whole blocks.

    Of few rows all programs wait for a position's attention: the tile's is short.
    """
    b = tile or (16 if blocks == 1 else 32)
    return ProductTiles(
        **{"tile": b, "sub_tile": b, "attend_rows": 4, "splits": 1, "stages": 3},
        **dict.fromkeys(("rows", "keys", "depth", "columns"), SIDE),
    )
