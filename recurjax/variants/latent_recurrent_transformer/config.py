"""What a Latent Recurrent Transformer can be, and what it costs."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from recurjax.layers.initialization import InitConfig
from recurjax.layers.stack import Remat, StackFacts
from recurjax.ranges import NonNegativeInt, PositiveInt, Range, check_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """What earlier tokens hand on, and where it enters.

    Attributes:
      sources: the layers, counted from 1, after which the state is read; of several a
        learned average is taken, before the norm.
      normed: whether the state is RMS-normed.
      lags: how many tokens back; 0 is the token's own state from a first forward
        without memory, which doubles the cost of a decoded token.
      combine: of several lags: "average", with learned weights, or "sum".
      projection: the keys' and values' projection of the memory: one for all layers
        ("shared") or one per layer ("layerwise").
      keys, values: whether the memory enters them; a side that it does not enter has
        no gate.
      residual: whether it is added to each block's input.
      entry_layers: it enters keys and values of the first `entry_layers` layers only;
        None: of all.
      replace_layers: in the first `replace_layers` layers its keys and values replace
        the local ones.
      reset_token: an id whose token, and those after it, see no memory from before it;
        None: never.
    """

    sources: tuple[PositiveInt, ...]
    normed: bool = True
    lags: tuple[NonNegativeInt, ...] = (1,)
    combine: Literal["average", "sum"] = "average"
    projection: Literal["shared", "layerwise"] = "shared"
    keys: bool = True
    values: bool = True
    residual: bool = True
    entry_layers: NonNegativeInt | None = None
    replace_layers: NonNegativeInt = 0
    reset_token: NonNegativeInt | None = None

    def __post_init__(self):
        check_ranges(self)
        if not self.sources or not self.lags:
            raise ValueError(
                "MemoryConfig: sources and lags must have at least one entry "
                f"each, got {self.sources} and {self.lags}"
            )
        if len(set(self.sources)) < len(self.sources):
            raise ValueError(
                f"MemoryConfig: sources must differ from each other, got {self.sources}"
            )
        if len(set(self.lags)) < len(self.lags):
            raise ValueError(
                f"MemoryConfig: lags must differ from each other, got {self.lags}"
            )
        if not (self.keys or self.values or self.residual):
            raise ValueError(
                "MemoryConfig: at least one of keys, values and residual must be true"
            )

    @property
    def gated(self) -> bool:
        """Whether the memory enters keys or values, by gates."""
        return self.keys or self.values

    @property
    def depth(self) -> int:
        """How many earlier states a token needs."""
        return max(self.lags)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentRecurrentTransformerConfig(StackFacts):
    """The nanochat backbone, with or without a latent memory.

    Attributes:
      layers: L.
      width: D.
      heads: H.
      key_heads: K, a divisor of H.
      head_width: E.
      mlp_width: F.
      vocabulary: rows of the value embeddings: the model's padded vocabulary.
      length: the training length, from which the windows come.
      windows: a letter for each layer, tiled: "S" sees length // 2 tokens back, "L" all
        the length; the last layer is always "L".
      rope_base: of the rotation by -theta.
      value_embeddings: which layers add an embedding of the token to their values:
        "all", "alternating" (the last, the one before the last but one, ...), "none".
      value_gate_channels: inputs that the gate of the value embeddings reads, from the
        front; 0: all.
      value_gate_scale: c of that gate, c sigmoid(w a).
      residual_scales: x <- alpha x at each block's input.
      input_mixing: beta x0 is added there: "input"; "dense" also adds every earlier
        block's output with a weight of its own; "none".
      value_residual: the first layer's values are mixed into the others' ("first"), or
        a projection of the input x0 is added to each layer's ("projected"); "none".
      attention_scale, mlp_scale: learned factors of what the branches write.
      memory: None is the baseline.
      init: see `InitConfig`; nanochat's by default.
      remat: what the backward pass computes again, see `TransformerConfig`.
      unroll: repeats of the layer pattern in one turn of the scan over layers.
    """

    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    key_heads: PositiveInt
    head_width: PositiveInt
    mlp_width: PositiveInt
    vocabulary: PositiveInt
    length: PositiveInt
    windows: str = "SSSL"
    rope_base: Annotated[float, Range(above=1)] = 10000.0
    value_embeddings: Literal["all", "alternating", "none"] = "all"
    value_gate_channels: NonNegativeInt = 32
    value_gate_scale: float = 2.0
    residual_scales: bool = True
    input_mixing: Literal["none", "input", "dense"] = "input"
    value_residual: Literal["none", "first", "projected"] = "none"
    attention_scale: bool = False
    mlp_scale: bool = False
    memory: MemoryConfig | None = None
    init: InitConfig = field(
        default_factory=lambda: InitConfig(
            distribution="uniform",
            std=None,
            output="zero",
            embedding_std=1.0,
            head_std=0.001,
        )
    )
    remat: Remat = "nothing"
    unroll: PositiveInt = 1

    def __post_init__(self):
        check_ranges(self)
        if self.heads % self.key_heads or self.head_width % 2:
            raise ValueError(
                "LatentRecurrentTransformerConfig: key_heads must divide heads and "
                f"head_width be even, got {self.key_heads}, {self.heads} and "
                f"{self.head_width}"
            )
        if not self.windows or set(self.windows) - set("SL"):
            raise ValueError(
                "LatentRecurrentTransformerConfig: windows must consist of the "
                f"letters S and L, got {self.windows!r}"
            )
        if self.value_gate_channels > self.width:
            raise ValueError(
                "LatentRecurrentTransformerConfig: value_gate_channels must be at most "
                f"the width {self.width}, got {self.value_gate_channels}"
            )
        memory = self.memory
        if memory is not None and max(memory.sources) > self.layers:
            raise ValueError(
                "LatentRecurrentTransformerConfig: memory.sources must be layers in 1.."
                f"{self.layers}, got {memory.sources}"
            )

    @property
    def training_length(self) -> int:
        """The length of training that the windows come from."""
        return self.length

    @property
    def takes_segments(self) -> bool:
        """Whether its stack takes segments: the exact recurrence takes none."""
        return self.memory is None

    @property
    def table_rows(self) -> int:
        """Rows of the value embeddings."""
        return self.vocabulary

    def with_table_rows(self, rows: int) -> "LatentRecurrentTransformerConfig":
        """Returns the config with `rows` rows in the value embeddings."""
        return replace(self, vocabulary=rows)

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """How many tokens back each layer sees."""
        letters = [self.windows[i % len(self.windows)] for i in range(self.layers - 1)]
        spans = {"S": self.length // 2, "L": self.length}
        return tuple(spans[letter] for letter in (*letters, "L"))

    @property
    def layer_value_embeddings(self) -> tuple[bool, ...]:
        """Whether each layer has value embeddings."""
        last = (self.layers - 1) % 2
        return tuple(
            self.value_embeddings == "all"
            or (self.value_embeddings == "alternating" and i % 2 == last)
            for i in range(self.layers)
        )

    @property
    def pattern(self) -> int:
        """P: layers l and l + P are alike, so that a scan runs over repeats of P."""
        kinds = list(zip(self.layer_windows, self.layer_value_embeddings, strict=True))
        return next(
            P
            for P in range(1, self.layers + 1)
            if self.layers % P == 0 and kinds == kinds[:P] * (self.layers // P)
        )

    def flops_per_token(self, length: int) -> float:
        """Counts training FLOPs of one pass per token, without embedding and head.

        6 a weight of every matrix product and 12 H E min(w, T) a layer for attention,
        w its window. Source: nanochat's count. An objective of several passes costs
        their number in forwards more.
        """
        D, E, K = self.width, self.head_width, self.key_heads
        weights = 2 * D * E * (self.heads + K) + 2 * D * self.mlp_width
        total = float(self.layers * weights)
        channels = self.value_gate_channels or D
        total += sum(self.layer_value_embeddings) * channels * K
        if self.value_residual == "projected":
            total += self.layers * D * K * E
        if self.memory is not None:
            gates = self.layers * 2 * K * D if self.memory.gated else 0
            sides = self.memory.keys + self.memory.values
            copies = self.layers if self.memory.projection == "layerwise" else 1
            total += gates + sides * copies * D * K * E
        seen = sum(min(window, length) for window in self.layer_windows)
        return 6.0 * total + 12.0 * self.heads * E * seen
