"""Attention to the ends of earlier chunks, merged with a position's own term."""

from pallas_kernels.chunk_attention.api import chunk_attention
from pallas_kernels.chunk_attention.arrays import ChunkEnds
from pallas_kernels.chunk_attention.block_sizes import BlockSizes

__all__ = ["BlockSizes", "ChunkEnds", "chunk_attention"]
