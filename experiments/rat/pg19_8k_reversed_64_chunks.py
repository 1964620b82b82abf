"""The paper's Table 9, 200M, T 8,192: the reversed design, 64 chunks.

Expect perplexity 14.21.
"""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.reversed_rat(**SMALL, chunk=128, length=8192)
    return pg19("pg19_8k_reversed_64_chunks", mixer, length=8192)
