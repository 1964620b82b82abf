"""The paper's Table 11, 1.3B, T 16,384: RAT(16): perplexity 7.52."""

from rat_paper import LARGE, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rat(**LARGE, chunk=16)
    return fineweb("fineweb_16k_rat16", mixer, length=16384)
