"""The paper's Table 11, 1.3B, T 16,384: attention-SWA: perplexity 7.45."""

from rat_paper import LARGE, WINDOW, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.attention(**LARGE)
    window = presets.attention(**LARGE, window=WINDOW)
    return fineweb("fineweb_16k_attention_swa", mixer, window, length=16384)
