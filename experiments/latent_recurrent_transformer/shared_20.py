"""Tables 4 and 5, 20L shared: 0.754 BPB at R = 10."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=shared(20))
    return experiment("lrt_shared_20", stack)
