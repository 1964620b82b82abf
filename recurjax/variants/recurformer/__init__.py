"""RecurFormer: recency-bound heads of a pretrained Transformer become Mamba."""

from recurjax.layers.mamba import MambaConfig
from recurjax.variants.recurformer.config import RecurFormerConfig
from recurjax.variants.recurformer.stack import RecurFormerStack

__all__ = ["MambaConfig", "RecurFormerConfig", "RecurFormerStack"]
