"""Recurrent Transformer layers: prefill, training and decode in one op."""

from pallas_kernels.recurrent_prefill.api import recurrent_prefill
from pallas_kernels.recurrent_prefill.call import (
    BlockSizes,
    LayerSpec,
    LayerWeights,
    RecurrentCache,
    Residuals,
    Rows,
    empty_cache,
)

__all__ = [
    "BlockSizes",
    "LayerSpec",
    "LayerWeights",
    "RecurrentCache",
    "Residuals",
    "Rows",
    "empty_cache",
    "recurrent_prefill",
]
