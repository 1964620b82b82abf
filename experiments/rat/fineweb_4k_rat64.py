"""The paper's Fig. 4(c), 1.3B, T 4,096: RAT(64): perplexity in that figure only."""

from rat_paper import LARGE, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rat(**LARGE, chunk=64)
    return fineweb("fineweb_4k_rat64", mixer)
