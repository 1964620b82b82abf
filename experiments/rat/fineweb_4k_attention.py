"""The paper's Table 1, 1.3B, T 4,096: attention: perplexity 7.61."""

from rat_paper import LARGE, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.attention(**LARGE)
    return fineweb("fineweb_4k_attention", mixer)
