"""Table 2: memory of 3 tokens back: 0.760 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=shared(20, lags=(3,)))
    return experiment("lrt_lag_3", stack)
