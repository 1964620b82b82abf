"""The paper's Table 11, 1.3B, T 16,384: RAT(16)-SWA: perplexity 7.42."""

from rat_paper import LARGE, WINDOW, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rat(**LARGE, chunk=16)
    window = presets.attention(**LARGE, window=WINDOW)
    return fineweb("fineweb_16k_rat16_swa", mixer, window, length=16384)
