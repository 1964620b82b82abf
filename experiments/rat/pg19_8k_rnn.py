"""The paper's Fig. 4(b), 200M, T 8,192: RNN: perplexity 14.31."""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rnn(**SMALL, length=8192)
    return pg19("pg19_8k_rnn", mixer, length=8192)
