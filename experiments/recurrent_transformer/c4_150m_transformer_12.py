"""The paper's 150M table: Transformer, 12 layers of width 1024: loss 3.067."""

from c4 import experiment, transformer

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = transformer(layers=12, width=1024)
    return experiment("rt_c4_150m_transformer_12", stack, steps=12_500)
