"""The Recurrent Transformer: layers attend to pairs made from their own outputs."""

from recurjax.variants.recurrent_transformer.config import (
    RecurrentTransformerConfig,
    shipped_config,
)
from recurjax.variants.recurrent_transformer.stack import RecurrentTransformerStack

__all__ = ["RecurrentTransformerConfig", "RecurrentTransformerStack", "shipped_config"]
