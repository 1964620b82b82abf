"""`recurjax evaluate RUN --task NAME`: a synthetic task's test, by slice."""

import dataclasses
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from recurjax.cli.evaluate.options import Evaluate
from recurjax.cli.evaluate.text import of_data
from recurjax.data.tasks import (
    Compression,
    HashHop,
    TaskConfig,
    TaskData,
    TaskDataset,
)
from recurjax.data.tasks.named import NAMED, limited, name_of
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.evaluation.accuracy import curves_of, plot_by_slice
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.hash_hop import SCORE, generated_chains, read_chains
from recurjax.evaluation.rows import Row, mean_and_error
from recurjax.sharding import local_rows, reading_mesh
from recurjax.training.objective import Compress
from recurjax.training.placement import placed
from recurjax.training.run import LoadedRun


def of_task(
    options: Evaluate, loaded: LoadedRun, mesh: Mesh | None, evaluator: Evaluator
) -> tuple[dict[str, Any], list[Row]]:
    """Tests the model on a task.

    A run that was trained on a task of this name is tested on its own, with its sizes
    and seed; any other model on the one that the task's source describes.

    Args:
      options: with the task's name, which is known.
      loaded: the model.
      mesh: None: one device.
      evaluator: the model as one that writes answers, for HashHop as text.

    Returns:
      What is printed, and the rows that the run keeps.

    Raises:
      UserError: the model's vocabulary or positions do not fit the task.
    """
    assert options.task is not None
    data = _data(options, loaded)
    task, name = data.task, options.task
    sizes = _changed(task, NAMED[name])
    # The task's rows are bytes. A model with other tokens cannot read them, and is
    # asked in text, as one would ask it.
    if isinstance(task, HashHop) and not isinstance(loaded.tokenizer, ByteTokenizer):
        scores = generated_chains(evaluator, data)
        row = _chain_row(options, loaded, data, scores, sizes)
        told = {"task": name, SCORE: row.value, "rows": row.n}
        return told, [row]
    # A larger vocabulary has tokens that the model has no embedding of.
    if task.vocabulary > loaded.model.config.vocabulary:
        raise UserError(
            f"the task {name} has {task.vocabulary} tokens and the model reads "
            f"{loaded.model.config.vocabulary}: train a run on it, or take a task "
            "with fewer"
        )
    compresses = isinstance(loaded.experiment.objective, Compress)
    if isinstance(task, Compression) != compresses:
        raise UserError(
            f"the task {name} does not go with how the run is read: mad_compression, "
            "and it alone, asks a model that was trained by the objective Compress"
        )
    longest = task.longest("validation")
    if options.length is not None and options.length < longest:
        raise UserError(
            f"--length {options.length}: the task {name} has rows of {longest} tokens; "
            "leave it out"
        )
    # Rows as long as the task's own, unless longer ones are asked for.
    options = replace(options, length=options.length or longest)
    told, rows = of_data(options, loaded, mesh, data, text=name)
    rows = [
        replace(
            row,
            seed=data.seed,
            limit=options.limit,
            settings={**row.settings, **sizes},
        )
        for row in rows
    ]
    told = {"task" if key == "text" else key: value for key, value in told.items()}
    # Beside the share of right tokens: how far along its chains the model comes.
    if isinstance(task, HashHop):
        on, batch = reading_mesh(options.mesh), options.batch
        batches = TaskDataset(config=data).loader(
            "validation",
            length=options.length or task.length,
            batch=batch,
            rows=local_rows(batch, on),
        )
        with jax.set_mesh(on):
            scores = read_chains(
                loaded.model,
                placed(batches, on, batch=batch),
                task,
                objective=loaded.experiment.objective,
                mesh=mesh,
            )
        rows.append(_chain_row(options, loaded, data, scores, sizes))
        told[SCORE] = rows[-1].value
    # One of several processes draws the picture.
    if options.plot is not None and jax.process_index() == 0:
        found = told["accuracy"]
        curves = {
            loaded.experiment.name: curves_of(found["slices"], found["positions"])
        }
        plot_by_slice(curves, options.plot, trained=loaded.experiment.training.length)
    return told, rows


def _data(options: Evaluate, loaded: LoadedRun) -> TaskData:
    own, name = loaded.experiment.data, options.task
    assert name is not None
    # A run on this very task is tested on its own sizes; else the named ones count.
    if isinstance(own, TaskData) and name_of(own.task) == name:
        data = own
    else:
        data = TaskData(task=NAMED[name], seed=options.seed)
    return replace(data, task=limited(data.task, options.limit))


def _changed(task: TaskConfig, named: TaskConfig) -> dict[str, Any]:
    """Returns the numbers and words in which a task is not the named one."""
    return {
        field.name: getattr(task, field.name)
        for field in dataclasses.fields(task)
        # Numbers of rows change how well a figure is known, not what it is of.
        if getattr(task, field.name) != getattr(named, field.name)
        and isinstance(getattr(task, field.name), int | float | str)
        and not field.name.endswith("_rows")
    }


def _chain_row(
    options: Evaluate,
    loaded: LoadedRun,
    data: TaskData,
    scores: list[float],
    sizes: dict[str, Any],
) -> Row:
    assert options.task is not None
    # The score is a mean over rows, so it has an error.
    mean, error = mean_and_error(scores)
    return Row(
        step=loaded.step,
        task=options.task,
        metric=SCORE,
        value=mean,
        stderr=error,
        n=len(scores),
        limit=options.limit,
        seed=data.seed,
        settings={"length": data.task.longest("validation"), **sizes},
    )
