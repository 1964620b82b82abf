"""The paper's Fig. 4(c), 1.3B, T 4,096: RNN: perplexity in that figure only."""

from rat_paper import LARGE, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rnn(**LARGE, length=4096)
    return fineweb("fineweb_4k_rnn", mixer)
