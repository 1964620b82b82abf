"""The paper's 150M table: RT, 12 layers of width 1024 (151.0M): loss 3.046."""

from c4 import experiment, recurrent

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = recurrent(layers=12, width=1024)
    return experiment("rt_c4_150m_recurrent_12", stack, steps=12_500)
