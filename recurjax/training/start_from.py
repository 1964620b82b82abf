"""Starting a run from another one's parameters: `training.start_from`."""

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.experiment import Experiment, model_differences, read_experiment
from recurjax.model import Decoder
from recurjax.training.run_directory import RunDirectory, load_run


def check_start(experiment: Experiment, tokenizer: Tokenizer) -> None:
    """Refuses, before anything is trained, parameters that do not fit.

    Raises:
      UserError: `training.start_from` is no run directory, or has another model (all
        differences are listed) or another tokenizer.
    """
    start = experiment.training.start_from
    if start is None:
        return
    directory = RunDirectory(Path(start))
    other = read_experiment(directory.config)
    if differing := model_differences(experiment.model, other.model):
        raise UserError(
            f"training.start_from {start} has another model than this run: "
            f"{'; '.join(differing)}"
        )
    if directory.load_tokenizer(other).hash != tokenizer.hash:
        raise UserError(
            f"training.start_from {start} has another tokenizer than this run: use "
            f'TokenizerFile(path="{directory.tokenizer}")'
        )


def load_start(
    experiment: Experiment, mesh: Mesh, report: Callable[[str], None]
) -> Decoder | None:
    """Loads the parameters to start from, onto the run's mesh; None: there are none."""
    start = experiment.training.start_from
    if start is None:
        return None
    found = load_run(start, mesh=mesh, report=report)
    report(f"starting from the parameters of {start} at step {found.step}")
    return found.model
