"""Tables 4 and 5, 24L layerwise: 0.720 BPB at R = 10."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import layerwise, nanochat


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(24, memory=layerwise(24))
    return experiment("lrt_layerwise_24", stack)
