"""The paper's norm ablation at 150M: the persistent pair from z instead of norm(z).

Expect a clearly higher loss; the paper could not train it above a rate of 1e-3.
"""

import dataclasses

from c4 import experiment, recurrent

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = dataclasses.replace(
        recurrent(layers=12, width=1024), normed_persistent=False
    )
    return experiment("rt_c4_150m_unnormed", stack, steps=12_500, rate=1e-3)
