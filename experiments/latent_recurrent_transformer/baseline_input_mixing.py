"""Table 8: input residual mixing: 0.779 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, value_embeddings="none")
    return experiment("lrt_baseline_input_mixing", stack)
