"""The paper's Table 9, 200M, T 8,192: the reversed design, 16 chunks.

Expect perplexity 13.69.
"""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.reversed_rat(**SMALL, chunk=512, length=8192)
    return pg19("pg19_8k_reversed_16_chunks", mixer, length=8192)
