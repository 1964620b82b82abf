"""nanochat's sizes from the depth, and the paper's two memories."""

from typing import Any

from recurjax.layers.norm import NormConfig
from recurjax.variants.latent_recurrent_transformer.config import (
    LatentRecurrentTransformerConfig,
    MemoryConfig,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import EPS

HEAD_WIDTH = 128
PADDED_VOCABULARY = 32768
FINAL_NORM = NormConfig(scale=False, eps=EPS)
"""nanochat's norm before the head: `recurrence.rms`, as everywhere in the blocks."""


def nanochat(
    layers: int,
    *,
    vocabulary: int = PADDED_VOCABULARY,
    length: int = 2048,
    memory: MemoryConfig | None = None,
    **others: Any,
) -> LatentRecurrentTransformerConfig:
    """Returns the backbone of L layers: width 64 L, heads of 128, MLP of 4 widths.

    Args:
      layers: L; 20 and 24 in the paper.
      vocabulary: padded.
      length: the training length, from which the windows follow.
      memory: None: the baseline.
      others: further fields, or other values of those above.

    Raises:
      ValueError: head_width does not divide the width (odd L), and heads is None.
    """
    width = others.pop("width", 64 * layers)
    head_width = others.pop("head_width", HEAD_WIDTH)
    if "heads" not in others and (width < head_width or width % head_width):
        raise ValueError(
            f"nanochat: width {width} is not a multiple of head_width "
            f"{head_width}: set heads, another head_width, or an even number "
            "of layers"
        )
    heads = others.pop("heads", width // head_width)
    fields = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "key_heads": heads,
        "head_width": head_width,
        "mlp_width": 4 * width,
        "vocabulary": vocabulary,
        "length": length,
        "memory": memory,
    }
    return LatentRecurrentTransformerConfig(**fields | others)


def source_layer(layers: int) -> int:
    """Returns the paper's source layer: 12 of 20, 14 of 24, else 3/5 of the way up."""
    return {20: 12, 24: 14}.get(layers, max(1, round(0.6 * layers)))


def shared(layers: int, **others: Any) -> MemoryConfig:
    """Returns LRT-shared's memory: one projection of keys and values for all layers."""
    return MemoryConfig(sources=(source_layer(layers),), **others)


def layerwise(layers: int, **others: Any) -> MemoryConfig:
    """Returns LRT-layerwise's memory: a projection in each layer."""
    return shared(layers, projection="layerwise", **others)
