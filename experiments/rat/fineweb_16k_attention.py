"""The paper's Table 11, 1.3B, T 16,384: attention: perplexity 7.44."""

from rat_paper import LARGE, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.attention(**LARGE)
    return fineweb("fineweb_16k_attention", mixer, length=16384)
