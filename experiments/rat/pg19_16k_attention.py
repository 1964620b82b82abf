"""The paper's Table 9, 200M, T 16,384: attention: perplexity 13.10."""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.attention(**SMALL)
    return pg19("pg19_16k_attention", mixer, length=16384)
