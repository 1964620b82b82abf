"""Table 6: KV projection in place of the local, first third of layers: 0.760 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(
        20, memory=shared(20, residual=False, entry_layers=7, replace_layers=7)
    )
    return experiment("lrt_replacing_third", stack)
