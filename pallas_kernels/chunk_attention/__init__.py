"""Attention to the ends of earlier chunks, merged with a position's own term."""

from pallas_kernels.chunk_attention.api import chunk_attention
from pallas_kernels.chunk_attention.call import BlockSizes, ChunkEnds

__all__ = ["BlockSizes", "ChunkEnds", "chunk_attention"]
