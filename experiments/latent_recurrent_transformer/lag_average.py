"""Table 2: learned average of the last four states: 0.754 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=shared(20, lags=(1, 2, 3, 4)))
    return experiment("lrt_lag_average", stack)
