"""Table 8: value embedding: 0.770 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, residual_scales=False, input_mixing="none")
    return experiment("lrt_baseline_value_embedding", stack)
