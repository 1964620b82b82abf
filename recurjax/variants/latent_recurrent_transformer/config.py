"""Configs of the Latent Recurrent Transformer, and its FLOPs."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from recurjax.layers.initialization import InitConfig
from recurjax.layers.stack import Remat, StackFacts
from recurjax.ranges import NonNegativeInt, PositiveInt, Range, check_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """The latent memory: which states earlier tokens pass on, and where they enter.

    Attributes:
      sources: layers, counted from 1, whose output state is the memory; of several, a
        learned average, taken before the norm.
      normed: RMS-normalize the state.
      lags: how many tokens back each state is taken from. 0 is the token's own state
        from a first forward without memory, which doubles the cost of decoding.
      combine: how several lags become one memory: "average", with learned weights, or
        "sum".
      projection: the projection of the memory to keys and values: "shared" by all
        layers, or "layerwise".
      keys: let the memory enter the keys, with a gate.
      values: let the memory enter the values, with a gate.
      residual: add the memory to each block's input.
      entry_layers: number of layers, from the first, whose keys and values the memory
        enters; None: all.
      replace_layers: number of layers, from the first, where the memory's keys and
        values replace the local ones.
      reset_token: id of a token that starts a document: it and the tokens after it see
        no memory from before it; None: no resets.
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
      layers: L, the number of layers.
      width: D, the model width.
      heads: H, the number of query heads.
      key_heads: K, the number of key and value heads, a divisor of H.
      head_width: E, the width of a head.
      mlp_width: F, the hidden width of the MLP.
      vocabulary: rows of the value embeddings: the model's padded vocabulary.
      length: the training length in tokens, from which `windows` are computed.
      windows: one letter per layer, tiled: "S" attends to length // 2 tokens back, "L"
        to the full length; the last layer is always "L".
      rope_base: base of the rotary embedding, which rotates by -theta as nanochat does.
      value_embeddings: layers that add a token embedding to their values: "all";
        "alternating", every second one so that the last has it; "none".
      value_gate_channels: leading input channels that the gate of the value embeddings
        reads; 0: all.
      value_gate_scale: c of that gate, c sigmoid(w a).
      residual_scales: learn a factor alpha of each block's input, x <- alpha x.
      input_mixing: what each block's input mixes in with learned weights: "input", the
        embedding x0; "dense", x0 and the outputs of all earlier blocks; "none".
      value_residual: what mixes into a layer's values: "first", the first layer's
        values; "projected", a projection of x0; "none".
      attention_scale: learn a factor of the attention's output.
      mlp_scale: learn a factor of the MLP's output.
      memory: the latent memory; None: none, the baseline.
      init: distribution of the initial weights, by default nanochat's.
      remat: what the backward pass recomputes: "nothing"; "dots", everything but matrix
        products with weights; "block", everything inside a block.
      unroll: repeats of the pattern per iteration of the scan over layers. Larger
        values compile for longer and may train faster.
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
    def reset_token(self) -> int | None:
        """Id of the token that the memory does not cross, if any."""
        return None if self.memory is None else self.memory.reset_token

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
