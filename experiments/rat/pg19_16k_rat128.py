"""The paper's Table 9, 200M, T 16,384: RAT(128): perplexity 13.44."""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rat(**SMALL, chunk=128)
    return pg19("pg19_16k_rat128", mixer, length=16384)
