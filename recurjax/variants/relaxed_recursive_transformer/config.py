"""The config of Relaxed Recursive Transformers, and its FLOPs."""

from dataclasses import dataclass
from typing import Literal

from recurjax.layers.initialization import InitConfig
from recurjax.layers.stack import StackFacts
from recurjax.ranges import NonNegativeInt, PositiveInt, check_ranges
from recurjax.variants.rat import RatConfig
from recurjax.variants.transformer import TransformerConfig

Sharing = Literal["cycle", "sequence", "cycle_rev"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RelaxedRecursiveTransformerConfig(StackFacts):
    """An L-layer Transformer under a constraint: its layers share K = L / loops blocks.

    Depth counts the layers as they are run, from 0 to L - 1.

    Attributes:
      transformer: the L-layer Transformer, or a stack of RAT's mixers; residual scale,
        depth of the init and FLOPs are those of its L layers.
      loops: how many times the block of K layers runs; 1 is the Transformer itself.
      sharing: the layer of the block that runs at depth l: "cycle", l mod K;
        "sequence", l // loops; "cycle_rev", as "cycle" with the last loop in reverse.
      rank: R, the rank of the LoRA (x A) B that each depth adds to each linear map, at
        most the smaller side of the map. 0: no LoRA, so that all loops are the same.
      tie_norms: share norms and biases between loops; off: each depth has its own,
        which recovering a pretrained model requires.
      loop_cache: depths with keys and values of their own: "own", all; "first", those
        of loop 1, which deeper loops read, so that a token that exits early lacks none.
        A model is trained for one of the two; layers of a `RatConfig` have "own".
    """

    transformer: TransformerConfig | RatConfig
    loops: PositiveInt
    sharing: Sharing = "cycle"
    rank: NonNegativeInt = 0
    tie_norms: bool = True
    loop_cache: Literal["own", "first"] = "own"

    def __post_init__(self):
        check_ranges(self)
        name, L, B = type(self).__name__, self.transformer.layers, self.loops
        if L % B:
            raise ValueError(f"{name}: loops must divide the {L} layers, got {B}")
        kinds, of_rat = (
            self.transformer.pattern,
            isinstance(self.transformer, RatConfig),
        )
        differs = "mixers" if of_rat else "windows or positions"
        # Backwards or in sequence, a layer of the block would come to places with other
        # mixers, windows or positions.
        if len(set(kinds)) > 1 and B > 1 and self.sharing != "cycle":
            raise ValueError(
                f"{name}: with sharing {self.sharing!r} one shared layer would "
                f"have several {differs} ({kinds}): use sharing 'cycle' "
                "or equal layers"
            )
        if self.block_layers % len(kinds):
            raise ValueError(
                f"{name}: the pattern of {len(kinds)} {differs} must "
                f"divide the block's {self.block_layers} layers, so that every "
                "loop has the same ones"
            )
        if isinstance(self.transformer, RatConfig) and self.transformer.memory:
            raise ValueError(
                f"{name}: a looped block cannot pass states on to later tokens: "
                "leave out the memory of the RatConfig"
            )
        if of_rat and self.loop_cache == "first":
            raise ValueError(
                f"{name}: loop_cache 'first' needs a TransformerConfig, whose deeper "
                "loops can read the keys and values of loop 1; mixers of a RatConfig "
                "also have states, one of each depth: use 'own'"
            )

    @property
    def width(self) -> int:
        """D."""
        return self.transformer.width

    @property
    def init(self) -> InitConfig:
        """Distribution of the initial weights."""
        return self.transformer.init

    @property
    def layers(self) -> int:
        """L, the layers as they are run."""
        return self.transformer.layers

    @property
    def block_layers(self) -> int:
        """K, the layers of the shared block."""
        return self.transformer.layers // self.loops

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence; None: no limit."""
        return self.transformer.max_length

    def flops_per_token(self, length: int) -> float:
        """Counts training FLOPs per token of the L-layer stack and the additions.

        Sharing saves parameters and no work. 6 a weight, L (N + M) R of them for each
        map from N to M. Deeper loops that read loop 1's keys and values project none.
        """
        base = self.transformer
        # Sharing saves memory, not work: every depth is run.
        total = base.flops_per_token(length)
        # The additions, over the depths that run each map of each place.
        repeats = self.block_layers // len(base.pattern)
        maps = (base.block_maps(place) for place in range(len(base.pattern)))
        for name, (inputs, outputs) in (item for each in maps for item in each.items()):
            run = self.loops * repeats
            # Keys and values are projected in the first loop only, by matrices and
            # additions.
            if self.loop_cache == "first" and name in ("k", "v"):
                run = repeats
                total -= 6.0 * (self.loops - 1) * repeats * inputs * outputs
            rank = min(self.rank, inputs, outputs)
            total += 6.0 * run * rank * (inputs + outputs)
        return total
