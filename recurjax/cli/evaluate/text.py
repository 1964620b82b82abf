"""`recurjax evaluate RUN` of a text, or of the run's own data."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import jax
from jax.sharding import Mesh

from recurjax.cli.evaluate.exits import of_exits
from recurjax.cli.evaluate.options import Evaluate
from recurjax.data.config import DataConfig, TextFiles
from recurjax.data.dataset import open_dataset
from recurjax.data.tasks import TaskData
from recurjax.errors import UserError
from recurjax.evaluation.by_position import loss_by_position, plot_by_position
from recurjax.evaluation.perplexity import Score, score
from recurjax.evaluation.progress import progress_bar
from recurjax.evaluation.rows import Row, share_error
from recurjax.ranges import LARGEST_BATCH
from recurjax.sharding import check_batch, local_rows, reading_mesh
from recurjax.training.objective import Distilled, Exits, NextToken, Objective
from recurjax.training.placement import placed
from recurjax.training.run import LoadedRun
from recurjax.types import Batch


def of_text(
    options: Evaluate, loaded: LoadedRun, mesh: Mesh | None
) -> tuple[dict[str, Any], list[Row]]:
    """Scores the text; returns what is printed, and the rows that the run keeps."""
    data = loaded.experiment.data
    if options.text is None:
        return of_data(options, loaded, mesh, data, text=f"{options.split} split")
    if isinstance(data, TaskData):
        raise UserError(
            f"{options.run} was trained on a task: leave --text out to test it"
        )
    # A text of one's own is validation as a whole.
    data = DataConfig(
        corpus=TextFiles(patterns=(str(options.text),)),
        tokenizer=data.tokenizer,
        validation_fraction=1.0,
    )
    return of_data(options, loaded, mesh, data, text=str(options.text))


def of_data(
    options: Evaluate,
    loaded: LoadedRun,
    mesh: Mesh | None,
    data: DataConfig | TaskData,
    *,
    text: str,
) -> tuple[dict[str, Any], list[Row]]:
    """Scores a split of any data.

    Args:
      options: which split, how much of it, in what portions.
      loaded: the model.
      mesh: that its figures are gathered over; None: one device.
      data: text, or a task.
      text: what the figures are called.
    """
    experiment = loaded.experiment
    dataset = open_dataset(data, tokenizer=loaded.tokenizer)
    # A row is as long as in training, or as a task's test asks.
    length = options.length or dataset.evaluation_length(experiment.training.length)
    reason = experiment.model.refuses_length(length, f"--length {length}")
    if reason is not None:
        raise UserError(reason)
    if options.batch * length > LARGEST_BATCH:
        raise UserError(
            f"--batch {options.batch} x {length} tokens a row is more than "
            "2^28 tokens at a time: lower it"
        )
    split = "validation" if data is not experiment.data else options.split
    on = reading_mesh(options.mesh)
    check_batch(options.batch, on, name="--batch")
    # A model that runs on the mesh at one length may refuse another.
    if (reason := loaded.model.stack.refuses(on, length)) is not None:
        raise UserError(reason)

    limit = options.batches
    if options.tokens is not None:
        # Whole batches, rounded up.
        limit = -(-options.tokens // (options.batch * length))
    rows = dataset.loader(
        split,
        length=length,
        batch=options.batch,
        rows=local_rows(options.batch, on),
        in_order=True,
    )
    # The bar's total: the pass, or the limit if that is shorter.
    known = [count for count in (rows.batches, limit) if count is not None]

    def batches() -> Iterator[Batch]:
        # Made anew for each pass over the text: iterators are used up.
        return placed(islice(rows, limit), on, batch=options.batch)

    if options.exits:

        def training_rows() -> Iterator[Batch]:
            own = open_dataset(experiment.data, tokenizer=loaded.tokenizer)
            drawn = own.loader("train", length=length, batch=options.batch)
            limited = islice(iter(drawn), options.fit_head)
            return placed(limited, on, batch=options.batch)

        return of_exits(
            options, loaded, batches, training_rows, text=text, length=length
        )

    def scored(objective: Objective) -> Score:
        sizes = dataset.tokenizer.token_bytes
        with (
            jax.set_mesh(on),
            progress_bar(f"batches of {text}", min(known, default=None)) as done,
        ):
            return score(
                loaded.model,
                batches(),
                token_bytes=sizes,
                objective=objective,
                between=lambda: done(1),
                slices=dataset.slices(split, batch=options.batch),
                mesh=mesh,
            )

    objective = experiment.objective
    result = scored(objective)
    report: dict[str, Any] = {"text": text, "length": length, **_told(result)}
    kept = _rows(result, text, options, loaded, length)
    # What training's objective computes in parallel passes is an approximation of it
    # for some variants; the exact figure is what generation will do.
    if not isinstance(objective, NextToken | Distilled | Exits):
        # Beside training's parallel passes, the recurrence that decoding runs.
        exact = scored(NextToken(vocabulary_chunks=objective.vocabulary_chunks))
        report["exact"] = _told(exact)
        kept += _rows(exact, f"{text}, exact", options, loaded, length)
    if options.positions is not None:
        with jax.set_mesh(on):
            stretches = loss_by_position(
                loaded.model,
                batches(),
                stretch=options.positions,
                chunks=objective.vocabulary_chunks,
                mesh=mesh,
            )
        report["positions"] = [stretch._asdict() for stretch in stretches]
        if options.plot is not None and jax.process_index() == 0:
            trained, curves = experiment.training.length, {experiment.name: stretches}
            plot_by_position(curves, options.plot, trained=trained)
    return report, kept


def _told(result: Score) -> dict[str, Any]:
    told = result._asdict()
    if result.accuracy is None:
        del told["accuracy"]
    else:
        told["accuracy"] = result.accuracy._asdict()
    if not result.passes:
        del told["passes"]
    return told


def _rows(
    result: Score, text: str, options: Evaluate, loaded: LoadedRun, length: int
) -> list[Row]:
    settings: dict[str, Any] = {"length": length}
    for name in ("batches", "tokens"):
        if (given := getattr(options, name)) is not None:
            settings[name] = given
    rows = []
    for name, value in result.metrics().items():
        error, n = None, result.tokens
        if result.accuracy is not None and name == "sequence_accuracy":
            # Of whole rows: the number of rows is what the error depends on.
            n = result.accuracy.rows
            error = share_error(value, n)
        elif result.accuracy is not None and name.startswith("accuracy/"):
            n = result.accuracy.answers[name.removeprefix("accuracy/")]
        rows.append(
            Row(
                step=loaded.step,
                task=text,
                metric=name,
                value=value,
                stderr=error,
                n=n,
                settings=settings,
            )
        )
    return rows
