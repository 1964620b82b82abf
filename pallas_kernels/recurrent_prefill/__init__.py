"""Recurrent Transformer layers: prefill, training and decode in one op."""

from pallas_kernels.recurrent_prefill.api import recurrent_prefill
from pallas_kernels.recurrent_prefill.arrays import (
    LayerSpec,
    LayerWeights,
    RecurrentCache,
    Residuals,
    Rows,
    empty_cache,
)
from pallas_kernels.recurrent_prefill.block_sizes import BlockSizes

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
