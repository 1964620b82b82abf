"""Table 2: the token's own state, two forwards a token: 0.754 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=shared(20, lags=(0,)))
    return experiment("lrt_own_state", stack)
