"""Table 1 of the paper: RT, 12 layers of width 1408 (285.5M): loss 2.867."""

from c4 import experiment, recurrent

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = recurrent(layers=12, width=1408)
    return experiment("rt_c4_300m_recurrent_12", stack, steps=25_000)
