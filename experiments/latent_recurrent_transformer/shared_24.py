"""Tables 4 and 5, 24L shared: 0.722 BPB at R = 10."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(24, memory=shared(24))
    return experiment("lrt_shared_24", stack)
