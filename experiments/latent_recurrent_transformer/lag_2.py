"""Table 2: memory of 2 tokens back: 0.757 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=shared(20, lags=(2,)))
    return experiment("lrt_lag_2", stack)
