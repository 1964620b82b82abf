"""The paper's Table 9, 200M, T 8,192: attention: perplexity 13.26."""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.attention(**SMALL)
    return pg19("pg19_8k_attention", mixer, length=8192)
