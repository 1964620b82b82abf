"""Table 8: gated attention: 0.782 BPB."""

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
        attention_scale=True,
    )
    return experiment("lrt_baseline_gated_attention", stack)
