"""The paper's Fig. 4(a), 200M: RAT(64) rotated by tokens.

Expect perplexity up by about 0.3.
"""

from dataclasses import replace

from rat_paper import SMALL, pg19

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = replace(presets.rat(**SMALL, chunk=64), position_of="token")
    return pg19("pg19_8k_rat64_token_rope", mixer, length=8192)
