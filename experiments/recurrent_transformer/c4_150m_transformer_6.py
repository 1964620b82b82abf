"""The paper's 150M table: Transformer, 6 layers of width 1408: loss 3.097."""

from c4 import experiment, transformer

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = transformer(layers=6, width=1408)
    return experiment("rt_c4_150m_transformer_6", stack, steps=12_500)
