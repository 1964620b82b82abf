"""A model's CORE: how it reads the prompts, and the table of what it scores."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from jax.sharding import Mesh

from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.evaluation.core.prompts import Task
from recurjax.evaluation.core.score import CoreScore, TaskScore, score_core
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.progress import progress_bar
from recurjax.evaluation.remembered import remembered_scores
from recurjax.evaluation.rows import Row, share_error
from recurjax.evaluation.scorer import Pair, PairScore, Reading, Scorer
from recurjax.model import Decoder

AS_CALLED = "core"
"""The model as it is called: of a latent memory, the exact recurrence."""

ZERO_MEMORY = "core_zero_memory"
"""A latent memory's parallel pass without it."""


def core_of(
    model: Decoder,
    tokenizer: Tokenizer,
    tasks: Iterable[Task],
    *,
    limit: int | None = None,
    mesh: Mesh | None = None,
    rows: int = 16,
    report: Callable[[str, TaskScore], None] = lambda reading, score: None,
    journal: Journal | None = None,
) -> dict[str, CoreScore]:
    """Scores a model in each way that it can read.

    Args:
      model: any variant.
      tokenizer: its BOS stands before each prompt, or else its EOS.
      tasks: see `read_tasks`.
      limit: items a task; None: all.
      mesh: that the model lies on; None: one device.
      rows: read at a time.
      report: called with the reading and each of its tasks' scores.
      journal: keeps the pairs' scores; None: nothing does.

    Returns:
      The score under `AS_CALLED` and, of a model with a latent memory, also under
      `ZERO_MEMORY`.

    Raises:
      UserError: the tokenizer has neither BOS nor EOS; or as `score_core`.
    """
    first = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
    if first is None:
        raise UserError(
            "CORE puts a BOS token before each prompt, and the tokenizer has none"
        )

    def encode(texts: list[str]) -> list[list[int]]:
        # Every prompt begins as a document does, whatever it continues.
        return [[first, *ids.tolist()] for ids in tokenizer.encode_many(texts)]

    kept = Journal(None) if journal is None else journal

    def scores(reading: Reading, pairs: Sequence[Pair]) -> list[PairScore]:
        with progress_bar(f"CORE ({reading})", len(pairs)) as done:
            scorer = Scorer(
                model=model, mesh=mesh, rows=rows, reading=reading, report=done
            )
            return remembered_scores(scorer, kept, pairs)

    tasks = tuple(tasks)
    readings: dict[str, Reading] = {AS_CALLED: "as_called"}
    # A latent memory can be left out: the pass without it shows what it is worth.
    if model.has_latent_memory:
        readings[ZERO_MEMORY] = "zero_memory"
    return {
        name: score_core(
            tasks,
            partial(scores, reading),
            encode,
            limit=limit,
            longest=model.config.max_length,
            report=lambda score, name=name: report(name, score),
        )
        for name, reading in readings.items()
    }


def as_json(scores: Mapping[str, CoreScore]) -> dict[str, Any]:
    """Returns each reading's CORE and its tasks, as plain values."""
    return {
        name: {"core": score.core, "tasks": [task._asdict() for task in score.tasks]}
        for name, score in scores.items()
    }


def markdown(scores: Mapping[str, CoreScore]) -> str:
    """Returns a table with a row a task, and CORE as the last one.

    Of each reading it has the accuracy and, after it, the centered accuracy.
    """
    heads = "".join(f" {name} | centered |" for name in scores)
    lines = [f"| task | items |{heads}", "|---|---|" + "---|---|" * len(scores)]
    # Task by task, over all readings: their tasks come in one order.
    for row in zip(*(score.tasks for score in scores.values()), strict=True):
        told = "".join(f" {task.accuracy:.4f} | {task.centered:.4f} |" for task in row)
        lines.append(f"| {row[0].label} | {row[0].items} |{told}")
    told = "".join(f" | {score.core:.4f} |" for score in scores.values())
    return "\n".join([*lines, f"| CORE | |{told}"]) + "\n"


def rows(scores: Mapping[str, CoreScore], *, step: int, limit: int | None) -> list[Row]:
    """Returns each task's accuracy and each reading's CORE as rows to keep."""
    made = []
    for name, score in scores.items():
        common = {"step": step, "limit": limit, "settings": {"reading": name}}
        for task in score.tasks:
            error = share_error(task.accuracy, task.items)
            for metric, value, stderr in (
                # A centered accuracy's error would need the chance level's own.
                ("accuracy", task.accuracy, error),
                ("centered", task.centered, None),
            ):
                row = Row(
                    task=task.label,
                    metric=metric,
                    value=value,
                    stderr=stderr,
                    n=task.items,
                    **common,
                )
                made.append(row)
        # CORE is over tasks; its n counts the items that went into it.
        items = sum(task.items for task in score.tasks)
        made.append(
            Row(task="CORE", metric="core", value=score.core, n=items, **common)
        )
    return made
