"""Configs of RAT: mixers, their pattern over the layers, and FLOPs."""

import math
from dataclasses import dataclass, field
from typing import Literal

from recurjax.layers.attention import AttentionConfig
from recurjax.layers.initialization import InitConfig
from recurjax.layers.linear import LinearMaps, Maps
from recurjax.layers.mamba import MambaConfig, mamba_flops, mamba_weights
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import LearnedPositions, Rope, rotary_width
from recurjax.layers.stack import Remat, StackFacts
from recurjax.ranges import NonNegativeInt, PositiveInt, check_ranges
from recurjax.variants.latent_recurrent_transformer.config import MemoryConfig
from recurjax.variants.recurrent_transformer.config import LayerSwitches


@dataclass(frozen=True, kw_only=True, slots=True)
class RatMixerConfig(LinearMaps):
    """Recurrence inside chunks, attention across them.

    Attributes:
      heads: H, the number of heads.
      head_width: E, the width of a head; the H * E recurrent channels may differ from
        the model width.
      chunk: C, the tokens of a chunk.
      groups: N, the number of query and key projections; head h uses projection h mod
        N.
      position: rotation of queries and of the keys at chunk ends; None: none (NoPE).
      position_of: the position that is rotated by: "chunk", t // C; or "token", t, the
        paper's ablation.
      forget_rank: rank of the forget gate's projection; None: full.
      output_rank: rank of the output gate's projection; None: full.
    """

    heads: PositiveInt
    head_width: PositiveInt
    chunk: PositiveInt
    groups: PositiveInt
    position: Rope | None = field(default_factory=Rope)
    position_of: Literal["chunk", "token"] = "chunk"
    forget_rank: PositiveInt | None = None
    output_rank: PositiveInt | None = None

    def __post_init__(self):
        check_ranges(self)
        _check_heads(self)

    @property
    def gate_horizon(self) -> int:
        """How many tokens the forget gate's initial bias spans."""
        return self.chunk

    def maps(self, width: int) -> Maps:
        """Returns the sizes (N, M) of its linear maps, by name."""
        inner, queries = self.heads * self.head_width, self.groups * self.head_width
        maps = {"q": (width, queries), "k": (width, queries), "v": (width, inner)}
        return maps | {"out": (inner, width)} | _gates(self, width)

    def seen(self, length: int) -> int:
        """Counts the keys of a position, at most, in a sequence of T."""
        return -(-length // self.chunk)


@dataclass(frozen=True, kw_only=True, slots=True)
class RnnMixerConfig(LinearMaps):
    """The baseline: RAT's recurrence over the full sequence, without attention.

    Attributes:
      heads: H, the number of heads, by which a tensor mesh shards the H * E channels.
      head_width: E, the channels of a head.
      gate_horizon: the forget gate's bias starts at log U(1, gate_horizon - 1); the
        paper uses the training length.
      forget_rank: rank of the forget gate's projection; None: full.
      output_rank: rank of the output gate's projection; None: full.
    """

    heads: PositiveInt
    head_width: PositiveInt
    gate_horizon: PositiveInt
    forget_rank: PositiveInt | None = None
    output_rank: PositiveInt | None = None

    def maps(self, width: int) -> Maps:
        """Returns the sizes (N, M) of its linear maps, by name."""
        inner = self.heads * self.head_width
        return {"v": (width, inner), "out": (inner, width)} | _gates(self, width)

    def seen(self, length: int) -> int:
        """Returns 0: it has no keys."""
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReversedRatMixerConfig(LinearMaps):
    """The reversed design: attention inside chunks, recurrence across them.

    Attributes:
      heads: H, the number of heads.
      head_width: E, the width of a head.
      chunk: C, the tokens of a chunk.
      groups: N, the number of query projections, tiled over the heads; every head has
        its own key projection.
      position: rotation by the token's position; None: none (NoPE).
      gate_horizon: the forget gate's bias starts at log U(1, gate_horizon - 1), counted
        in chunks.
      forget_rank: rank of the forget gate's projection; None: full, as in the paper.
      output_rank: rank of the output gate's projection, low in the paper; None: full.
    """

    heads: PositiveInt
    head_width: PositiveInt
    chunk: PositiveInt
    groups: PositiveInt
    gate_horizon: PositiveInt
    position: Rope | None = field(default_factory=Rope)
    forget_rank: PositiveInt | None = None
    output_rank: PositiveInt | None = None

    def __post_init__(self):
        check_ranges(self)
        _check_heads(self)

    def maps(self, width: int) -> Maps:
        """Returns the sizes (N, M) of its linear maps, by name."""
        inner = self.heads * self.head_width
        maps = {"q": (width, self.groups * self.head_width)}
        maps |= {"k": (width, inner), "v": (width, inner), "out": (inner, width)}
        return maps | _gates(self, width)

    def seen(self, length: int) -> int:
        """Counts the keys of a position, at most, in a sequence of T."""
        return min(self.chunk, length)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMixerConfig(LinearMaps):
    """Attention over all tokens or a window of them.

    Attributes:
      attention: the attention layer.
      window: how far back a token sees, so window + 1 keys; None: the full sequence.
    """

    attention: AttentionConfig
    window: NonNegativeInt | None = None

    def __post_init__(self):
        check_ranges(self)
        _refuse_learned_positions(self)

    @property
    def heads(self) -> int:
        """H."""
        return self.attention.heads

    @property
    def head_width(self) -> int:
        """E."""
        return self.attention.head_width

    def maps(self, width: int) -> Maps:
        """Returns the sizes (N, M) of its linear maps, by name."""
        return self.attention.maps(width)

    def seen(self, length: int) -> int:
        """Counts the keys of a position, at most, in a sequence of T."""
        return length if self.window is None else min(self.window + 1, length)


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaMixerConfig(MambaConfig):
    """Mamba over the model width D: RecurFormer's mixer without heads around it."""

    def weights(self, width: int) -> int:
        """Counts the weights of its matrix products."""
        return mamba_weights(self, width)

    def seen(self, length: int) -> int:
        """Returns 0: it has no keys."""
        return 0


MixerConfig = (
    RatMixerConfig
    | RnnMixerConfig
    | ReversedRatMixerConfig
    | AttentionMixerConfig
    | MambaMixerConfig
)
"""What mixes tokens in a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayerConfig(LayerSwitches):
    """A Recurrent Transformer layer, in the place of a mixer and its MLP.

    Keys and values come from the layer's own output. The stack's norm, MLP and init
    serve it as every layer.
    """

    def __post_init__(self):
        LayerSwitches.__post_init__(self)
        _refuse_learned_positions(self)


PlaceConfig = MixerConfig | RecurrentLayerConfig
"""A place of the pattern: a mixer, which an MLP follows, or a complete layer."""


def mixing_flops(mixer: PlaceConfig, width: int, length: int) -> float:
    """Counts a mixer's training FLOPs per token at length T.

    6 a weight of every matrix product, and 12 H E a key that a position sees: all T / C
    chunks for RAT (forward and backward; the causal half is not discounted). RAT's and
    the RNN's recurrence, 6 H E multiply-adds a token and stream, is left out; Mamba's,
    N times as large, counts: see `mamba_flops`.
    """
    if isinstance(mixer, MambaMixerConfig):
        return mamba_flops(mixer, width)
    seen = 12.0 * mixer.heads * mixer.head_width * mixer.seen(length)
    return 6.0 * mixer.weights(width) + seen


@dataclass(frozen=True, kw_only=True, slots=True)
class RatConfig(StackFacts):
    """A stack of L layers, each a mixer and an MLP, or a Recurrent Transformer layer.

    Attributes:
      layers: L, the number of layers.
      width: D, the model width.
      pattern: the mixers of layers 0, 1, ..., repeated over the stack; the number of
        places divides L.
      mlp: the feed-forward part of every layer.
      norm: the norm before both branches.
      memory: states of earlier tokens that enter each layer's input, scaled by a
        learned number: the Latent Recurrent Transformer's memory, `residual` alone;
        None: none.
      init: distribution of the initial weights.
      remat: what the backward pass recomputes: "nothing"; "dots", everything but matrix
        products with weights; "block", everything inside a block.
      unroll: repeats of the pattern per iteration of the scan over layers. Larger
        values compile for longer and may train faster.
    """

    layers: PositiveInt
    width: PositiveInt
    pattern: tuple[PlaceConfig, ...]
    mlp: MlpConfig
    norm: NormConfig = field(default_factory=NormConfig)
    memory: MemoryConfig | None = None
    init: InitConfig = field(default_factory=InitConfig)
    remat: Remat = "nothing"
    unroll: PositiveInt = 1

    def __post_init__(self):
        check_ranges(self)
        if not self.pattern or self.layers % len(self.pattern):
            raise ValueError(
                "RatConfig: the number of mixers in pattern must divide "
                f"layers={self.layers}, got {len(self.pattern)}"
            )
        memory = self.memory
        if memory is None:
            return
        # Not every mixer has keys and values that a memory could enter.
        if memory.gated:
            raise ValueError(
                "RatConfig: memory must enter the residual stream alone: set its keys "
                "and values to false"
            )
        of_keys = memory.entry_layers, memory.replace_layers, memory.projection
        if of_keys != (None, 0, "shared"):
            raise ValueError(
                "RatConfig: memory enters every layer's input: leave its entry_layers, "
                "replace_layers and projection out, which are for keys and values"
            )
        if max(memory.sources) > self.layers:
            raise ValueError(
                f"RatConfig: memory.sources must be layers in 1..{self.layers}, got "
                f"{memory.sources}"
            )

    @property
    def reset_token(self) -> int | None:
        """Id of the token that the memory does not cross, if any."""
        return None if self.memory is None else self.memory.reset_token

    @property
    def takes_segments(self) -> bool:
        """Whether its stack takes segments: the exact recurrence takes none."""
        return self.memory is None

    @property
    def residual_scale(self) -> Literal["one", "inverse_sqrt_depth"]:
        """The factor of both branches where a place has one by depth, or one."""
        scales = {getattr(place, "residual_scale", "one") for place in self.pattern}
        return "one" if scales == {"one"} else "inverse_sqrt_depth"

    def block_maps(self, place: int) -> Maps:
        """Returns the sizes (N, M) of the linear maps of a place's layers, by name."""
        return self.pattern[place].maps(self.width) | self.mlp.maps(self.width)

    def flops_per_token(self, length: int) -> float:
        """Counts training FLOPs per token at length T, without embedding and head.

        6 a weight of the MLPs, and `mixing_flops` of each mixer.
        """
        mlp = self.mlp.weights(self.width)
        repeats = self.layers // len(self.pattern)
        mixing = (mixing_flops(mixer, self.width, length) for mixer in self.pattern)
        return 6.0 * self.layers * mlp + repeats * sum(mixing)


def gate_bias_span(horizon: int) -> float:
    """Returns log(max(horizon - 1, 1)), the largest initial gate bias."""
    return math.log(max(horizon - 1, 1))


def _gates(
    config: RatMixerConfig | RnnMixerConfig | ReversedRatMixerConfig, width: int
) -> Maps:
    """Returns the maps of both gates: one each, or two by way of a low rank."""
    inner, maps = config.heads * config.head_width, {}
    ranks = {"forget_gate": config.forget_rank, "output_gate": config.output_rank}
    for name, rank in ranks.items():
        if rank is None:
            maps[name] = (width, inner)
        else:
            maps[f"{name}_reduce"], maps[f"{name}_expand"] = (
                (width, rank),
                (rank, inner),
            )
    return maps


def _check_heads(config: RatMixerConfig | ReversedRatMixerConfig) -> None:
    if config.heads % config.groups:
        raise ValueError(
            f"{type(config).__name__}: groups must divide heads={config.heads}, got "
            f"{config.groups}"
        )
    if config.position is not None:
        rotary_width(config.head_width, config.position)


def _refuse_learned_positions(
    config: AttentionMixerConfig | RecurrentLayerConfig,
) -> None:
    layer = config.attention if isinstance(config, AttentionMixerConfig) else config
    if isinstance(layer.position, LearnedPositions):
        raise ValueError(
            f"{type(config).__name__}: position must not be learned, for which "
            "RatConfig has no table: use rope or ALiBi"
        )
