"""The paper's 150M table at batch 256: RT, 12 layers of width 1024: loss 3.036."""

from c4 import experiment, recurrent

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = recurrent(layers=12, width=1024)
    return experiment(
        "rt_c4_150m_recurrent_12_batch256", stack, steps=25_000, batch=256
    )
