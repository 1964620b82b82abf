"""The Latent Recurrent Transformer: the last token's upper state feeds the next."""

from recurjax.variants.latent_recurrent_transformer.config import (
    LatentRecurrentTransformerConfig,
    MemoryConfig,
)
from recurjax.variants.latent_recurrent_transformer.memory_stack import MemoryStack
from recurjax.variants.latent_recurrent_transformer.stack import (
    LatentRecurrentTransformerStack,
)

__all__ = [
    "LatentRecurrentTransformerConfig",
    "LatentRecurrentTransformerStack",
    "MemoryConfig",
    "MemoryStack",
]
