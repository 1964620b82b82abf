"""L Recurrent Transformer layers from position 0, their loop in the persistent kernel.

Forward only, in bfloat16. XLA computes a tile's queries and their attention to earlier
tiles; the kernel runs the tile's positions.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from experiments.recurrent_transformer.hopper.launch import (
    SIDE,
    WORKERS,
    Launch,
    LayerWidths,
    choose_cut,
    refusal_of_widths,
    slopes_of,
)
from pallas_kernels.recurrent_prefill.call import (
    Array,
    LayerSpec,
    LayerWeights,
    Residuals,
)
from pallas_kernels.recurrent_prefill.equations import HIDDEN, PreparedWeights, prepare
from pallas_kernels.recurrent_prefill.tiles.layout import queries_and_pairs
from pallas_kernels.target import current, shared_memory_bytes

_ROWS = 8
"""Rows are copied on chip in multiples of this many, which is how they are laid out."""
_H100_MULTIPROCESSORS = 132


def hopper_layers(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    *,
    spec: LayerSpec,
    tile: int | None = None,
    programs: int | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T D"], Residuals]:
    """Runs what `recurrent_prefill` does from position 0.

    Args:
      tile: positions of one launch, at most; None: 16 for up to 64 rows, else 32.
      programs: programs of one launch, at most; None: as many as the GPU has
        multiprocessors, or without a GPU as an H100 has.
      interpret: False, or the parameters of jax's interpreter of Mosaic GPU kernels.

    Returns:
      z, and what the op's backward passes read.

    Raises:
      NotImplementedError: the device cannot run the kernel, or the kernel this layer.
    """
    reason = None if interpret else refusal_of_device()
    programs = programs or _multiprocessors()
    reason = reason or refusal(x, weights, spec, programs)
    if reason is not None:
        raise NotImplementedError(f"hopper_layers: {reason}")
    B, T, D = x.shape
    launch = _launch(_widths(x, weights, spec), spec, B, programs, interpret)
    # Tiles of equal lengths: the last one is padded by as few positions as can be.
    tiles = -(-T // (tile or (16 if launch.blocks == 1 else 32)))
    b = -(-T // tiles)
    rows = x.astype(jnp.float32).swapaxes(0, 1)
    padding = ((0, tiles * b - T), (0, launch.blocks * SIDE - B), (0, 0))

    def layer(rows, weights):
        w, wide = jax.tree.map(lambda leaf: leaf[None], weights)
        z, attended, lse = _run_layer(launch, rows, w, wide)
        return z, (z, attended, lse)

    _, (z, attended, lse) = jax.lax.scan(
        layer,
        jnp.pad(rows, padding).reshape(tiles, b, -1, D),
        (prepare(weights, spec.dtype), prepare(weights, jnp.float32)),
    )

    def by_row(part: Array) -> Array:
        """Turns [L, tiles, b, B_padded, N] into [L, B, T, N]."""
        part = part.reshape(part.shape[0], -1, *part.shape[3:])
        return part[:, :T, :B].swapaxes(1, 2)

    z, attended, lse = map(by_row, (z, attended, lse.swapaxes(3, 4)))
    attended = attended.reshape(*attended.shape[:3], -1, spec.head_width)
    return z[-1].astype(x.dtype), Residuals(z=z, attended=attended, lse=lse)


def refusal_of_device() -> str | None:
    """Returns why the kernel cannot run on the target, None when it can."""
    target = current()
    if target.platform != "gpu":
        return f"needs an NVIDIA GPU of compute capability 9.0, found {target.platform}"
    if target.compute_capability != "9.0":
        return f"needs compute capability 9.0, found {target.compute_capability}"
    gpus = sum(device.platform == "gpu" for device in jax.devices())
    if gpus > 1:
        # Its programs wait for one another: NCCL can keep one of them from starting.
        return f"runs on one GPU, found {gpus}: name one in CUDA_VISIBLE_DEVICES"
    return None


def refusal(
    x: Float[Array, "B T D"], weights: LayerWeights, spec: LayerSpec, programs: int
) -> str | None:
    """Returns why `programs` programs cannot run a layer, or None."""
    if spec.rope_base is not None:
        return "has no rotary embedding"
    if spec.block != 1:
        return f"runs the unblocked recurrence, got block={spec.block}"
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
    return refusal_of_widths(widths, most=programs, shared=shared_memory_bytes())


def _widths(x: Array, weights: LayerWeights, spec: LayerSpec) -> LayerWidths:
    return LayerWidths(x.shape[2], spec.heads * spec.head_width, weights.w_up.shape[2])


def _multiprocessors() -> int:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return _H100_MULTIPROCESSORS
    return device.core_count


def _launch(
    widths: LayerWidths, spec: LayerSpec, batch: int, programs: int, interpret: Any
) -> Launch:
    cut = choose_cut(widths, most=programs, shared=shared_memory_bytes())
    assert cut is not None, "refusal names what does not fit"
    return Launch(
        spec=spec,
        cut=cut,
        blocks=-(-batch // SIDE),
        loaded=min(SIDE, -(-batch // _ROWS) * _ROWS),
        played=cut.programs if interpret else 1,
        workers=1 if interpret else WORKERS,
        interpret=interpret,
    )


def _run_layer(
    launch: Launch,
    x: Float[Array, "tiles b B D"],
    w: PreparedWeights,
    wide: PreparedWeights,
) -> tuple[Array, Array, Array]:
    """Returns z, attended values and normalizers of every tile.

    Args:
      w, wide: one layer's weights, in spec.dtype and in float32.
    """
    # Not above: only jaxlib for Linux has Mosaic GPU.
    from experiments.recurrent_transformer.hopper.forward import run_tile
    from experiments.recurrent_transformer.hopper.refs import Resident

    spec = launch.spec
    resident = Resident.of(wide, spec, launch.cut)
    tiles, b, B, _ = x.shape
    slots = jnp.zeros((tiles * b, B, spec.heads * spec.head_width), spec.dtype)

    def step(pairs, inputs):
        first, tile = inputs
        q, own_k, own_v = (part[0] for part in queries_and_pairs(tile[None], w, spec))
        running = _attend_prefix(q, own_k, own_v, pairs, first, spec)
        out = run_tile(launch, resident, tile, q, running, w.k_norm)
        pairs = tuple(
            jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=0)
            for old, new in zip(pairs, (out.keys, out.values), strict=True)
        )
        return pairs, (out.z, out.attended, out.lse)

    _, rows = jax.lax.scan(step, (slots, slots), (b * jnp.arange(tiles), x))
    return rows


def _attend_prefix(
    q: Float[Array, "b B HE"],
    own_k: Float[Array, "b B HE"],
    own_v: Float[Array, "b B HE"],
    pairs: tuple[Float[Array, "S B HE"], Float[Array, "S B HE"]],
    first: Int[Array, ""],
    spec: LayerSpec,
) -> tuple[Array, Array, Array]:
    """Returns the queries' softmax after their own and all earlier tiles' pairs.

    Args:
      first: the tile's first position; slots before it are filled.

    Returns:
      The largest logit and the normalizer, [b, H, B], and the weighted values,
      [b, B, H E].
    """
    wide = {"preferred_element_type": jnp.float32}
    H, E = spec.heads, spec.head_width
    q, own_k, own_v, k, v = (
        part.reshape(*part.shape[:2], H, E) for part in (q, own_k, own_v, *pairs)
    )
    self_logits = spec.logit_scale * jnp.einsum("tbhe,tbhe->tbh", q, own_k, **wide)
    t, s = first + jnp.arange(q.shape[0]), jnp.arange(k.shape[0])
    distance = (t[:, None] - s)[:, None, None]  # [b, 1, 1, S]
    logits = spec.logit_scale * jnp.einsum("tbhe,sbhe->tbhs", q, k, **wide)
    logits -= slopes_of(spec)[:, None] * distance
    logits = jnp.where(s < first, logits, HIDDEN)
    largest = jnp.maximum(self_logits, logits.max(axis=-1))
    p, p_own = jnp.exp(logits - largest[..., None]), jnp.exp(self_logits - largest)
    weighted = p_own[..., None] * own_v.astype(jnp.float32)
    weighted += jnp.einsum("tbhs,sbhe->tbhe", p.astype(v.dtype), v, **wide)
    normalizer = p_own + p.sum(axis=-1)
    return (
        largest.swapaxes(1, 2),
        normalizer.swapaxes(1, 2),
        weighted.reshape(*weighted.shape[:2], -1),
    )
