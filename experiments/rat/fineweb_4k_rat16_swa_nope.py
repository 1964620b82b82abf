"""The paper's Table 10, 1.3B: RAT(16)-SWA without positions but the windows': 7.63."""

from rat_paper import LARGE, WINDOW, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.rat(**LARGE, chunk=16)
    window = presets.attention(**LARGE, window=WINDOW)
    return fineweb("fineweb_4k_rat16_swa_nope", mixer, window, positions=False)
