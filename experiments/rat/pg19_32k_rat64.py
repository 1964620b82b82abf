"""The paper's Table 9, 200M, T 32,768: RAT(64): perplexity 13.39."""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rat(**SMALL, chunk=64)
    return pg19("pg19_32k_rat64", mixer, length=32768)
