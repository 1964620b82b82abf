"""Table 1 of the paper: Transformer, 24 layers of width 1024: loss 2.892."""

from c4 import experiment, transformer

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = transformer(layers=24, width=1024)
    return experiment("rt_c4_300m_transformer_24", stack, steps=25_000)
