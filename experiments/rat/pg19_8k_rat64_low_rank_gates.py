"""The paper's Fig. 4(a), 200M: RAT(64) with low-rank gates.

Expect perplexity up by 0.4 to 0.5.
"""

from rat_paper import SMALL, low_rank_gates, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = low_rank_gates(presets.rat(**SMALL, chunk=64))
    return pg19("pg19_8k_rat64_low_rank_gates", mixer, length=8192)
