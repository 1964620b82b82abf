"""Table 8: projected value residual: 0.780 BPB."""

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
        value_residual="projected",
    )
    return experiment("lrt_baseline_projected_value_residual", stack)
