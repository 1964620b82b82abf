"""The paper's 150M table at batch 256: Transformer, 12 layers: loss 3.059."""

from c4 import experiment, transformer

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = transformer(layers=12, width=1024)
    return experiment(
        "rt_c4_150m_transformer_12_batch256", stack, steps=25_000, batch=256
    )
