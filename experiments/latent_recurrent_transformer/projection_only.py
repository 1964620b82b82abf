"""Table 3: KV projection alone: 0.755 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=shared(20, residual=False))
    return experiment("lrt_projection_only", stack)
