"""The paper's Fig. 4(b), 200M, T 8,192: RAT(256): perplexity 13.72."""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rat(**SMALL, chunk=256)
    return pg19("pg19_8k_rat256", mixer, length=8192)
