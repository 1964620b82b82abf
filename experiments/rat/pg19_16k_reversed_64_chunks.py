"""The paper's Table 9, 200M, T 16,384: the reversed design, 64 chunks.

Expect perplexity 14.06.
"""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.reversed_rat(**SMALL, chunk=256, length=16384)
    return pg19("pg19_16k_reversed_64_chunks", mixer, length=16384)
