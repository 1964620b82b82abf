"""Table 8: value embedding, input mixing, gated attention: 0.767 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, attention_scale=True)
    return experiment("lrt_baseline_value_embedding_gated", stack)
