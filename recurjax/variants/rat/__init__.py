"""RAT: recurrence inside chunks, attention across them; and its baselines."""

from recurjax.variants.rat.config import (
    AttentionMixerConfig,
    MambaMixerConfig,
    MixerConfig,
    PlaceConfig,
    RatConfig,
    RatMixerConfig,
    RecurrentLayerConfig,
    ReversedRatMixerConfig,
    RnnMixerConfig,
)
from recurjax.variants.rat.latent_memory import MemoryRatStack
from recurjax.variants.rat.stack import RatStack

__all__ = [
    "AttentionMixerConfig",
    "MambaMixerConfig",
    "MemoryRatStack",
    "MixerConfig",
    "PlaceConfig",
    "RatConfig",
    "RatMixerConfig",
    "RatStack",
    "RecurrentLayerConfig",
    "ReversedRatMixerConfig",
    "RnnMixerConfig",
]
