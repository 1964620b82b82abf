"""The paper's Table 9, 200M, T 32,768: attention: perplexity 13.19."""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.attention(**SMALL)
    return pg19("pg19_32k_attention", mixer, length=32768)
