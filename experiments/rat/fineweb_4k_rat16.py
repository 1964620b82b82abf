"""The paper's Table 1, 1.3B, T 4,096: RAT(16): perplexity 7.67."""

from rat_paper import LARGE, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rat(**LARGE, chunk=16)
    return fineweb("fineweb_4k_rat16", mixer)
