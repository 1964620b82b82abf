"""The paper's Table 9, 200M, T 16,384: the reversed design, 16 chunks.

Expect perplexity 13.48.
"""

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.reversed_rat(**SMALL, chunk=1024, length=16384)
    return pg19("pg19_16k_reversed_16_chunks", mixer, length=16384)
