"""RAT: recurrence inside chunks, attention across them; and its baselines."""

from recurjax.variants.rat.config import (
    AttentionMixerConfig,
    MambaMixerConfig,
    MixerConfig,
    RatConfig,
    RatMixerConfig,
    ReversedRatMixerConfig,
    RnnMixerConfig,
)
from recurjax.variants.rat.stack import RatStack

__all__ = [
    "AttentionMixerConfig",
    "MambaMixerConfig",
    "MixerConfig",
    "RatConfig",
    "RatMixerConfig",
    "RatStack",
    "ReversedRatMixerConfig",
    "RnnMixerConfig",
]
