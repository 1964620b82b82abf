"""Recurrent transformers in JAX: one decoder, one trainer, exact fast kernels.

    import recurjax
    run = recurjax.load_run("runs/quickstart")
    print(recurjax.generate(run.model, ["HAMLET"], tokenizer=run.tokenizer).texts[0])

Names are imported when they are first used, so that `import recurjax` is quick and a
machine without the data packages can use the models.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recurjax.version import VERSION as __version__

if TYPE_CHECKING:
    from recurjax.data.dataset import open_dataset
    from recurjax.errors import UserError
    from recurjax.evaluation.perplexity import score
    from recurjax.experiment import Experiment
    from recurjax.inference.generate import generate
    from recurjax.inference.sampling import SamplingConfig
    from recurjax.model import Decoder, ModelConfig, count_parameters
    from recurjax.run_table import load_experiment
    from recurjax.training.loop import train
    from recurjax.training.run import load_run
    from recurjax.types import Tokens

_HOME = {
    "Decoder": "recurjax.model",
    "Experiment": "recurjax.experiment",
    "ModelConfig": "recurjax.model",
    "SamplingConfig": "recurjax.inference.sampling",
    "Tokens": "recurjax.types",
    "UserError": "recurjax.errors",
    "count_parameters": "recurjax.model",
    "generate": "recurjax.inference.generate",
    "load_experiment": "recurjax.run_table",
    "load_run": "recurjax.training.run",
    "open_dataset": "recurjax.data.dataset",
    "score": "recurjax.evaluation.perplexity",
    "train": "recurjax.training.loop",
}

__all__ = [
    "__version__",
    "Decoder",
    "Experiment",
    "ModelConfig",
    "SamplingConfig",
    "Tokens",
    "UserError",
    "count_parameters",
    "generate",
    "load_experiment",
    "load_run",
    "open_dataset",
    "score",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'recurjax' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
