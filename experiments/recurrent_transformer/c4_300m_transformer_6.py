"""Table 1 of the paper: Transformer, 6 layers of width 2048: loss 2.917."""

from c4 import experiment, transformer

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = transformer(layers=6, width=2048)
    return experiment("rt_c4_300m_transformer_6", stack, steps=25_000)
