"""The paper's Table 1, 1.3B, T 4,096: RAT(16)-SWA: perplexity 7.57."""

from rat_paper import LARGE, WINDOW, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rat(**LARGE, chunk=16)
    window = presets.attention(**LARGE, window=WINDOW)
    return fineweb("fineweb_4k_rat16_swa", mixer, window)
