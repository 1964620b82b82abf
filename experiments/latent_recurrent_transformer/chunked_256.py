"""Table 7: chunked training, C = 256: 0.767 BPB."""

from nanochat import experiment

from recurjax.experiment import Experiment
from recurjax.training.objective import Chunked
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared


def config() -> Experiment:
    """Returns the experiment."""
    stack = nanochat(20, memory=shared(20))
    return experiment("lrt_chunked_256", stack, objective=Chunked(chunk=256))
