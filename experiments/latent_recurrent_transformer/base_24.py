"""Tables 4 and 5, 24L base: 0.733 BPB at R = 10."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(24)
    return experiment("lrt_base_24", stack)
