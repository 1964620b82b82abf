"""The small pair on the embedded text: the Recurrent Transformer.

Reproduces no table; `shakespeare_pair.py` runs it at three rates with three seeds.
"""

from shakespeare import experiment, recurrent

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    return experiment("rt_shakespeare_recurrent", recurrent())
