"""Table 1 of the paper: RT, 6 layers of width 2048 (302.0M): loss 2.860."""

from c4 import experiment, recurrent

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = recurrent(layers=6, width=2048)
    return experiment("rt_c4_300m_recurrent_6", stack, steps=25_000)
