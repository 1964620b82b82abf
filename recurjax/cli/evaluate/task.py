"""`recurjax evaluate task RUN NAME`: a synthetic task's test, by slice."""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import Mesh

from recurjax.cli.evaluate.options import (
    Benchmark,
    Figures,
    Measure,
    evaluator_of,
    require_folder,
)
from recurjax.cli.evaluate.text import RowSource, score_rows
from recurjax.data.tasks import (
    Compression,
    HashHop,
    TaskConfig,
    TaskData,
    TaskDataset,
)
from recurjax.data.tasks.dataset import NAMED, check_named, limited, name_of
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.evaluation.accuracy import curves_of, plot_by_slice
from recurjax.evaluation.hash_hop import SCORE, generated_chains, read_chains
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.rows import Row, mean_and_error
from recurjax.ranges import PositiveInt, Seed
from recurjax.sharding import local_rows, placed
from recurjax.training.objective import Compress
from recurjax.training.run import LoadedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateTask(Benchmark):
    """Tests a model on a synthetic task.

    A run trained on a task of this name is tested with its own sizes and seed; any
    other model with those of the task's source.

    Attributes:
      task: name of the task: mqar, hash_hop, hash_hop_full, needles, copy, s3, s5,
        parity, mad_noisy_recall or another of MAD's.
      length: tokens per row, at least those of the task's rows; None: those of the
        task.
      limit: rows per setting of the task; None: all.
      seed: seed of the rows, unless the run was trained on the task and sets it.
      plot: draw the accuracies by pairs, length or position into this PNG file.
    """

    task: Annotated[str, tyro.conf.Positional]
    length: PositiveInt | None = None
    seed: Seed = 42
    plot: Path | None = None

    def __post_init__(self):
        Benchmark.__post_init__(self)
        require_folder("plot", self.plot)


def prepare_task(options: EvaluateTask) -> Measure:
    """Checks the task's name; returns the function that tests a model on it."""
    check_named(options.task)

    def measure(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Figures:
        data = _data(options, loaded)
        sizes = _changed(data.task, NAMED[options.task])
        # The task's rows are bytes. A model with other tokens cannot read them: it
        # writes text after a prompt of text.
        is_text = not isinstance(loaded.tokenizer, ByteTokenizer)
        if isinstance(data.task, HashHop) and is_text:
            evaluator = evaluator_of(options, loaded, mesh, journal, options.length)
            scores = generated_chains(evaluator, data)
            row = _chain_row(options, loaded, data, scores, sizes)
            figures = {SCORE: row.value, f"{SCORE}_floor": row.floor, "rows": row.n}
            return {"task": options.task, **figures}, [row]
        _check_fits(options, loaded, data.task)
        return _test(options, loaded, mesh, data, sizes)

    return measure


def _check_fits(options: EvaluateTask, loaded: LoadedRun, task: TaskConfig) -> None:
    # A larger vocabulary has tokens that the model has no embedding of.
    if task.vocabulary > loaded.model.config.vocabulary:
        raise UserError(
            f"the task {options.task} has {task.vocabulary} tokens and the "
            f"model {loaded.model.config.vocabulary}: train a run on it, or "
            "use a task with fewer tokens"
        )
    compresses = isinstance(loaded.experiment.objective, Compress)
    if isinstance(task, Compression) and not compresses:
        raise UserError(
            f"the task {options.task} needs a run trained with the objective Compress"
        )
    if compresses and not isinstance(task, Compression):
        raise UserError(
            f"the task {options.task} needs a run that predicts tokens: this "
            "one is trained with the objective Compress, for mad_compression "
            "only"
        )
    longest = task.longest("validation")
    if options.length is not None and options.length < longest:
        raise UserError(
            f"--length {options.length} is shorter than the task "
            f"{options.task}'s rows of {longest} tokens: leave it out"
        )


def _test(
    options: EvaluateTask,
    loaded: LoadedRun,
    mesh: Mesh | None,
    data: TaskData,
    sizes: dict[str, Any],
) -> Figures:
    task = data.task
    source = RowSource(
        loaded,
        data,
        options.task,
        split="validation",
        # By default rows are as long as the task's own; longer ones may be requested.
        length=options.length or task.longest("validation"),
        batch=options.batch,
        mesh=options.mesh,
    )
    report, rows = score_rows(source, loaded, mesh)
    rows = [
        replace(
            row,
            seed=data.seed,
            limit=options.limit,
            settings={**row.settings, **sizes},
        )
        for row in rows
    ]
    report = {"task" if key == "text" else key: x for key, x in report.items()}
    # In addition to accuracy: the share of a chain that the model follows.
    if isinstance(task, HashHop):
        batches = TaskDataset(config=data).loader(
            "validation",
            length=options.length or task.length,
            batch=options.batch,
            rows=local_rows(options.batch, source.mesh),
        )
        with jax.set_mesh(source.mesh):
            scores = read_chains(
                loaded.model,
                placed(batches, source.mesh, batch=options.batch),
                task,
                objective=loaded.experiment.objective,
                mesh=mesh,
            )
        rows.append(_chain_row(options, loaded, data, scores, sizes))
        report |= {SCORE: rows[-1].value, f"{SCORE}_floor": rows[-1].floor}
    # One of several processes draws the picture.
    if options.plot is not None and jax.process_index() == 0:
        accuracy = report["accuracy"]
        curves = curves_of(accuracy["slices"], accuracy["positions"])
        trained = loaded.experiment.training.length
        plot_by_slice({loaded.experiment.name: curves}, options.plot, trained=trained)
    return report, rows


def _data(options: EvaluateTask, loaded: LoadedRun) -> TaskData:
    data = loaded.experiment.data
    # A run on this very task is tested on its own sizes; else the named ones count.
    if not isinstance(data, TaskData) or name_of(data.task) != options.task:
        data = TaskData(task=NAMED[options.task], seed=options.seed)
    return replace(data, task=limited(data.task, options.limit))


def _changed(task: TaskConfig, named: TaskConfig) -> dict[str, Any]:
    """Returns the numbers and words in which a task is not the named one."""
    return {
        field.name: getattr(task, field.name)
        for field in dataclasses.fields(task)
        # The number of rows changes a figure's error, not its meaning.
        if getattr(task, field.name) != getattr(named, field.name)
        and isinstance(getattr(task, field.name), int | float | str)
        and not field.name.endswith("_rows")
    }


def _chain_row(
    options: EvaluateTask,
    loaded: LoadedRun,
    data: TaskData,
    scores: list[float],
    sizes: dict[str, Any],
) -> Row:
    assert isinstance(data.task, HashHop)
    # The score is a mean over rows, so it has an error.
    mean, error = mean_and_error(scores)
    return Row(
        step=loaded.step,
        task=options.task,
        metric=SCORE,
        value=mean,
        stderr=error,
        n=len(scores),
        floor=data.task.chain_floor(),
        limit=options.limit,
        seed=data.seed,
        settings={"length": data.task.longest("validation"), **sizes},
    )
