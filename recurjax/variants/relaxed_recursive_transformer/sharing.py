"""Which layer of the shared block is run at which depth: the paper's section 2.2."""

import numpy as np
from jaxtyping import Int

from recurjax.variants.relaxed_recursive_transformer.config import Sharing


def shared_layers(layers: int, loops: int, sharing: Sharing) -> Int[np.ndarray, " L"]:
    """Returns the block's layer at each depth l, with K = L / loops.

    cycle: l mod K; sequence: l // loops; cycle_rev: as cycle, the last loop backwards
    (with a single loop there is nothing to share, and nothing is turned).
    """
    block = layers // loops
    # The layers as they are run, from 0.
    depths = np.arange(layers)
    if sharing == "sequence":
        return depths // loops
    order = depths % block
    if sharing == "cycle_rev" and loops > 1:
        # The last loop from its last layer to its first.
        order[-block:] = order[-block:][::-1]
    return order


def depths_of(layers: int, loops: int, sharing: Sharing) -> Int[np.ndarray, "R K"]:
    """Returns the depth at which layer k of the block is run for the r-th time.

    This is how everything that belongs to a depth (additions, own norms, entries of the
    cache) finds its layer: by use first, then by layer, [loops, K].
    """
    order = shared_layers(layers, loops, sharing)
    # Each layer of the block is met `loops` times, whatever the sharing.
    uses = [np.flatnonzero(order == layer) for layer in range(layers // loops)]
    return np.stack(uses, axis=1)
