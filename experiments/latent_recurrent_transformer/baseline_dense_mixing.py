"""Table 8: dense residual mixing: 0.783 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, value_embeddings="none", input_mixing="dense")
    return experiment("lrt_baseline_dense_mixing", stack)
