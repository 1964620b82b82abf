"""Table 8: value residual: 0.779 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(
        20,
        value_embeddings="none",
        residual_scales=False,
        input_mixing="none",
        value_residual="first",
    )
    return experiment("lrt_baseline_value_residual", stack)
