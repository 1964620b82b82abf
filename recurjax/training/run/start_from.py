"""Other runs' parameters: `training.start_from`, and an objective's frozen model."""

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.experiment import Experiment, model_differences, read_experiment
from recurjax.files.storage import url_of
from recurjax.model import Decoder, ModelConfig
from recurjax.training.agreement import first_process
from recurjax.training.run.mirror import NO_STEP, fetched
from recurjax.training.run.run_directory import RunDirectory, load_run


def check_start(experiment: Experiment, tokenizer: Tokenizer) -> None:
    """Refuses, before anything is trained, parameters that do not fit.

    Raises:
      UserError: `training.start_from` is no run directory, or has another model (all
        differences are listed) or another tokenizer.
    """
    start = experiment.training.start_from
    if start is not None:
        _check_run(
            start,
            name="training.start_from",
            model=experiment.model,
            whose="this run",
            tokenizer=tokenizer,
        )


def check_frozen(experiment: Experiment, tokenizer: Tokenizer) -> None:
    """Refuses, before anything is trained, a frozen model that is not as described.

    Raises:
      UserError: `objective.frozen.run` is no run directory, or has another model than
        `objective.frozen.model` or another tokenizer than this run.
    """
    frozen = experiment.objective.frozen
    if frozen is not None:
        _check_run(
            frozen.run,
            name="objective.frozen.run",
            model=frozen.model,
            whose="objective.frozen.model",
            tokenizer=tokenizer,
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


def load_frozen(
    experiment: Experiment,
    mesh: Mesh,
    report: Callable[[str], None],
    *,
    record: RunDirectory | None = None,
) -> Decoder | None:
    """Loads the objective's frozen model onto the run's mesh; None: it has none.

    Args:
      record: of the run, where the model's path, step and digest are written down the
        first time. Later that step is loaded, whatever was trained since.

    Raises:
      UserError: the run was begun with other parameters.
    """
    frozen = experiment.objective.frozen
    if frozen is None:
        return None
    # A resumed run reads the very parameters that it began with.
    step = None if record is None else first_process(record.frozen_step)
    found = load_run(frozen.run, step=step, mesh=mesh, report=report)
    if record is not None:
        told = frozen.run, found.step, found.digest
        first_process(lambda: record.record_frozen(*told))
    report(f"the objective reads the frozen model of {frozen.run} at step {found.step}")
    return found.model


def _check_run(
    path: str, *, name: str, model: ModelConfig, whose: str, tokenizer: Tokenizer
) -> None:
    if (url := url_of(path)) is not None:
        # Config and tokenizer are enough to compare: no checkpoint is copied.
        with fetched(url, step=NO_STEP) as copy:
            return _check_run(
                str(copy.folder),
                name=name,
                model=model,
                whose=whose,
                tokenizer=tokenizer,
            )
    directory = RunDirectory(Path(path))
    other = read_experiment(directory.config)
    if differing := model_differences(model, other.model):
        raise UserError(
            f"{name} {path} has another model than {whose}: {'; '.join(differing)}"
        )
    if directory.load_tokenizer(other).hash != tokenizer.hash:
        raise UserError(
            f"{name} {path} has another tokenizer than this run: use "
            f'TokenizerFile(path="{directory.tokenizer}")'
        )
