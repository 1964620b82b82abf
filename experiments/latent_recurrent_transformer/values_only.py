"""Table 6: value projection alone: 0.756 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=shared(20, keys=False, residual=False))
    return experiment("lrt_values_only", stack)
