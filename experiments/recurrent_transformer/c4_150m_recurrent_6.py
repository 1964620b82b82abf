"""The paper's 150M table: RT, 6 layers of width 1408 (142.8M): loss 3.049."""

from c4 import experiment, recurrent

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = recurrent(layers=6, width=1408)
    return experiment("rt_c4_150m_recurrent_6", stack, steps=12_500)
