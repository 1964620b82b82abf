"""Table 2: own state plus the last token's: 0.752 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=shared(20, lags=(0, 1), combine="sum"))
    return experiment("lrt_own_and_last_state", stack)
