"""Relaxed Recursive Transformers: one block looped, with additions by depth."""

from recurjax.variants.relaxed_recursive_transformer.config import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.relaxed_recursive_transformer.stack import (
    RelaxedRecursiveTransformerStack,
)

__all__ = ["RelaxedRecursiveTransformerConfig", "RelaxedRecursiveTransformerStack"]
