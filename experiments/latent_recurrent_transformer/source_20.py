"""Table 1: memory from layer 20: 0.755 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from recurjax.variants.latent_recurrent_transformer.presets import nanochat


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=MemoryConfig(sources=(20,)))
    return experiment("lrt_source_20", stack)
