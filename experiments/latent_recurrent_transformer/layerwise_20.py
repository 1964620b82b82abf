"""Tables 4 and 5, 20L layerwise: 0.752 BPB at R = 10."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import layerwise, nanochat


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=layerwise(20))
    return experiment("lrt_layerwise_20", stack)
