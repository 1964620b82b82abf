"""The paper's Table 9, 200M, T 16,384: RAT(64): perplexity 13.34."""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rat(**SMALL, chunk=64)
    return pg19("pg19_16k_rat64", mixer, length=16384)
