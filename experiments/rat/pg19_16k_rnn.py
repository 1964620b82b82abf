"""The paper's Fig. 4(b), 200M, T 16,384: RNN: perplexity far above the 14.31 at 8K."""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rnn(**SMALL, length=16384)
    return pg19("pg19_16k_rnn", mixer, length=16384)
