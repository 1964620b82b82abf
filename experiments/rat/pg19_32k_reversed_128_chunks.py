"""The paper's Table 9, 200M, T 32,768: the reversed design, 128 chunks.

Expect perplexity 14.37.
"""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.reversed_rat(**SMALL, chunk=256, length=32768)
    return pg19("pg19_32k_reversed_128_chunks", mixer, length=32768)
