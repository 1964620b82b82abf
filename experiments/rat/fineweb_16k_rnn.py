"""The paper's Table 11, 1.3B, T 16,384: RNN: perplexity 8.09."""

from rat_paper import LARGE, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rnn(**LARGE, length=16384)
    return fineweb("fineweb_16k_rnn", mixer, length=16384)
