"""Recurrent transformers in JAX: one decoder, one trainer, exact fast kernels.

    import recurjax
    run = recurjax.load_run("runs/quickstart")
    print(recurjax.generate(run.model, ["HAMLET"], tokenizer=run.tokenizer).texts[0])

Names are imported when they are first used, so that `import recurjax` is quick and a
machine without the data packages can use the models.
"""

from typing import TYPE_CHECKING

from recurjax.lazy_names import lazy_names
from recurjax.version import VERSION as __version__

if TYPE_CHECKING:
    from recurjax.data.dataset import open_dataset
    from recurjax.errors import UserError
    from recurjax.evaluation.perplexity import score
    from recurjax.experiment import Experiment
    from recurjax.inference.generate import generate
    from recurjax.inference.sampling import SamplingConfig
    from recurjax.model import Decoder, ModelConfig, count_parameters
    from recurjax.parameters import tabulate
    from recurjax.run_table import load_experiment
    from recurjax.training.loop import train
    from recurjax.training.run import load_run
    from recurjax.types import Tokens

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
    "tabulate",
    "train",
]

__getattr__, __dir__ = lazy_names(__name__)
