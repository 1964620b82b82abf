"""The baseline: the pre-norm decoder-only Transformer and its common relatives."""

from recurjax.variants.transformer.config import TransformerConfig
from recurjax.variants.transformer.stack import TransformerStack

__all__ = ["TransformerConfig", "TransformerStack"]
