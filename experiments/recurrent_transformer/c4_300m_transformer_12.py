"""Table 1 of the paper: Transformer, 12 layers of width 1408: loss 2.896."""

from c4 import experiment, transformer

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = transformer(layers=12, width=1408)
    return experiment("rt_c4_300m_transformer_12", stack, steps=25_000)
