"""Table 9: S = 8: 0.754 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.training.objective import Interleaved
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=shared(20))
    return experiment("lrt_subsets_8", stack, objective=Interleaved(subsets=8))
