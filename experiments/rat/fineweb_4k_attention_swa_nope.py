"""The paper's Table 10, 1.3B: attention-SWA without positions but the windows'.

Expect 7.69.
"""

from rat_paper import LARGE, WINDOW, fineweb

from recurjax.experiment import Experiment
from recurjax.variants.rat import presets


def config() -> Experiment:
    """Returns the experiment."""
    mixer = presets.attention(**LARGE)
    window = presets.attention(**LARGE, window=WINDOW)
    return fineweb("fineweb_4k_attention_swa_nope", mixer, window, positions=False)
