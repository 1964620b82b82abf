"""Which of L pretrained layers each of the K shared ones starts from.

Source: the paper's section 2.3 and its ablations. Layers count from 0.
"""

from fractions import Fraction
from typing import Literal

from recurjax.variants.relaxed_recursive_transformer.block import depths_of
from recurjax.variants.relaxed_recursive_transformer.config import Sharing

BlockInit = Literal["stepwise", "average", "lower", "upper", "fixed_start", "random"]
"""How a block starts from pretrained layers:

stepwise: at equal steps from the first layer to the last, both kept; average: the mean
of all layers that share it; lower, upper: the first, the last K; fixed_start: at equal
steps from the first layer, the last not kept; random: from none, as a new model's: the
baseline of the others."""


def source_layers(
    init: BlockInit, layers: int, loops: int, sharing: Sharing = "cycle"
) -> tuple[tuple[int, ...], ...]:
    """Returns, for each of the block's K layers, the layers whose mean it starts from.

    Stepwise takes i (L - 1) / (K - 1), rounded to the nearest, halves to even. Rounding
    is of exact fractions: floating point rounds some of the halves up.

    Args:
      init: any but "random", which starts from no layer.
      sharing: which layers share one, for "average".
    """
    block = layers // loops
    if init == "average":
        depths = depths_of(layers, loops, sharing)
        return tuple(tuple(int(l) for l in depths[:, i]) for i in range(block))
    # With one layer to a block the steps have no second end; the first layer serves.
    if block == 1 and init != "upper":
        return ((0,),)
    if init == "random":
        raise ValueError("source_layers: a random block starts from no layer")
    starts = {
        "stepwise": lambda i: round(Fraction(i * (layers - 1), block - 1)),
        "lower": lambda i: i,
        "upper": lambda i: layers - block + i,
        "fixed_start": lambda i: i * layers // block,
    }
    return tuple((starts[init](i),) for i in range(block))


def evenly_kept(layers: int, kept: int) -> tuple[int, ...]:
    """Returns which layers stay when fewer are wanted: the ends, and equal steps.

    i (L - 1) / (kept - 1), rounded as stepwise; for L that the loops do not divide.
    """
    if not 1 <= kept <= layers:
        raise ValueError(f"evenly_kept: kept must lie in 1..{layers}, got {kept}")
    # One layer has no second end to step to.
    if kept == 1:
        return (0,)
    return tuple(round(Fraction(i * (layers - 1), kept - 1)) for i in range(kept))
