"""The models that the paper compares, with the authors' conventions, and hybrids.

Pre-norm RMSNorm with eps 1e-6, an exact-GELU MLP of 4 D without biases, N(0, 0.02) for
every weight; a window layer rotates by tokens and sees W + 1 keys. The decoder around
them has a tied, unscaled embedding: `ModelConfig(tied_head=True)`.
"""

import dataclasses
from typing import Any, Literal

from recurjax.layers.attention import AttentionConfig
from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.position import Rope
from recurjax.variants.latent_recurrent_transformer.config import MemoryConfig
from recurjax.variants.latent_recurrent_transformer.presets import source_layer
from recurjax.variants.rat.config import (
    AttentionMixerConfig,
    MambaMixerConfig,
    PlaceConfig,
    RatConfig,
    RatMixerConfig,
    RecurrentLayerConfig,
    ReversedRatMixerConfig,
    RnnMixerConfig,
)


def stack(*pattern: PlaceConfig, layers: int, width: int) -> RatConfig:
    """Returns L layers that repeat the pattern."""
    return RatConfig(
        layers=layers,
        width=width,
        pattern=pattern,
        mlp=MlpConfig(kind="gelu", width=4 * width),
        init=InitConfig(output="same"),
    )


def rat(
    *, width: int, heads: int, chunk: int, groups: int = 2, base: float = 10000.0
) -> RatMixerConfig:
    """Returns RAT(C): rotation by chunk, full gates, two query and key groups."""
    return RatMixerConfig(
        heads=heads,
        head_width=_head_width(width, heads),
        chunk=chunk,
        groups=groups,
        position=Rope(base=base),
    )


def rnn(*, width: int, heads: int, length: int) -> RnnMixerConfig:
    """Returns the RNN; `length` is the training length, for the gate's bias."""
    return RnnMixerConfig(
        heads=heads, head_width=_head_width(width, heads), gate_horizon=length
    )


def attention(
    *, width: int, heads: int, window: int | None = None, base: float = 10000.0
) -> AttentionMixerConfig:
    """Returns attention over all tokens, or over the last `window` + 1."""
    layer = AttentionConfig(
        heads=heads,
        key_heads=heads,
        head_width=_head_width(width, heads),
        position=Rope(base=base),
    )
    return AttentionMixerConfig(attention=layer, window=window)


def mamba(*, width: int) -> MambaMixerConfig:
    """Returns Mamba with its authors' sizes: 2 D channels, a step of rank D / 16."""
    return MambaMixerConfig(dt_rank=-(-width // 16))


def recurrent(*, width: int, heads: int) -> RecurrentLayerConfig:
    """Returns the Recurrent Transformer's layer with its paper's switches."""
    return RecurrentLayerConfig(
        heads=heads, key_heads=heads, head_width=_head_width(width, heads)
    )


Hybrid = Literal["mamba_attention", "mamba_window", "mamba_rat", "window_rt"]


def hybrid(
    name: Hybrid, *, width: int, heads: int, window: int = 1024, chunk: int = 16
) -> tuple[PlaceConfig, PlaceConfig]:
    """Returns the two places of a pattern that joins layers of two papers.

    Mamba comes first, as in Samba (Ren et al. 2024): its convolution has joined a token
    to those before it when the other mixer reads them.

    Args:
      window: of "window": how far back a token sees.
      chunk: C of "rat".
    """
    size = {"width": width, "heads": heads}
    match name:
        case "mamba_attention":
            return mamba(width=width), attention(**size)
        case "mamba_window":
            return mamba(width=width), attention(**size, window=window)
        case "mamba_rat":
            return mamba(width=width), rat(**size, chunk=chunk)
        case "window_rt":
            return attention(**size, window=window), recurrent(**size)


def with_memory(stack: RatConfig, **others: Any) -> RatConfig:
    """Returns a stack with the latent memory of the Latent Recurrent Transformer.

    It enters the residual stream alone, from LRT's source layer.

    Args:
      others: further fields of `MemoryConfig`, or other values of those above.
    """
    fields = {"sources": (source_layer(stack.layers),), "keys": False, "values": False}
    return dataclasses.replace(stack, memory=MemoryConfig(**fields | others))


def reversed_rat(
    *,
    width: int,
    heads: int,
    chunk: int,
    length: int,
    groups: int = 2,
    output_rank: int | None = None,
    base: float = 10000.0,
) -> ReversedRatMixerConfig:
    """Returns the reversed design.

    Args:
      length: the training length, for the gate's bias.
      output_rank: rank of the output gate; None: `balanced_rank`.
    """
    rank = balanced_rank(width, heads, groups) if output_rank is None else output_rank
    return ReversedRatMixerConfig(
        heads=heads,
        head_width=_head_width(width, heads),
        chunk=chunk,
        groups=groups,
        gate_horizon=-(-length // chunk),
        position=Rope(base=base),
        output_rank=rank,
    )


def _head_width(width: int, heads: int) -> int:
    if heads < 1 or width % heads:
        raise ValueError(f"width {width} is not a multiple of {heads} heads")
    return width // heads


def balanced_rank(width: int, heads: int, groups: int) -> int:
    """Returns the output gate's rank that makes the reversed layer RAT's size.

    RAT: (4 + 2 N / H) D^2; reversed: (4 + N / H) D^2 + 2 r D; so r = N D / (2 H).
    """
    return max(1, groups * width // (2 * heads))


def without_positions(config: RatConfig) -> RatConfig:
    """Returns the NoPE form: positions in window layers only."""

    def strip(mixer: PlaceConfig) -> PlaceConfig:
        if isinstance(mixer, RnnMixerConfig | MambaMixerConfig):
            return mixer
        if isinstance(mixer, AttentionMixerConfig):
            if mixer.window is not None:
                return mixer
            layer = dataclasses.replace(mixer.attention, position=None)
            return dataclasses.replace(mixer, attention=layer)
        return dataclasses.replace(mixer, position=None)

    pattern = tuple(strip(mixer) for mixer in config.pattern)
    return dataclasses.replace(config, pattern=pattern)
