"""A model's answers to RULER's items, scored."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from recurjax.evaluation.answerer import Question
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.rows import Row, mean_and_error
from recurjax.evaluation.ruler.scores import rat_share, string_match
from recurjax.evaluation.ruler.tasks import MOST, NEEDLES, RulerMaker

ITEMS = 500
"""A task, where nothing else is said: RULER's."""


def evaluate_ruler(
    evaluator: Evaluator,
    names: Sequence[str],
    *,
    tokens: int,
    text: str,
    haystack: str,
    limit: int | None = None,
    seed: int = 42,
) -> list[Row]:
    """Generates greedily after each prompt and scores what comes.

    Args:
      names: tasks, see `TASKS`.
      tokens: of a prompt and its answer.
      text: what needles are hidden in, where that is a text.
      haystack: its name, for the rows.
      limit: items a task; None: 500.
      seed: of the items.

    Returns:
      Of each task RULER's string match and, of needles, RAT's share of the set.

    Raises:
      UserError: a task is unknown, does not fit, or lacks its package.
    """
    rows = []
    for name in names:
        maker = RulerMaker(
            task=name,
            tokens=tokens,
            tokenizer=evaluator.tokenizer,
            text=text,
            seed=seed,
        )
        # All items first: questions of one length share a compiled program.
        items = [maker.item(number) for number in range(limit or ITEMS)]
        questions = [
            Question(evaluator.context(item.prompt), MOST[name]) for item in items
        ]
        said = evaluator.answers(questions, name=f"{name} at {tokens:,} tokens")
        scores = {"string_match": string_match}
        # RAT's table scores needles as a set; the other tasks have no such figure.
        if name in NEEDLES:
            scores["share_of_set"] = rat_share
        for metric, score in scores.items():
            values = [
                score(answer, item.wanted)
                for answer, item in zip(said, items, strict=True)
            ]
            mean, error = mean_and_error(values)
            row = Row(
                step=evaluator.step,
                task=f"ruler/{name}",
                metric=metric,
                value=mean,
                stderr=error,
                n=len(values),
                limit=limit,
                seed=seed,
                package=_package(),
                settings={"tokens": tokens, "haystack": haystack},
            )
            rows.append(row)
    return rows


def _package() -> str | None:
    try:
        return f"wonderwords {version('wonderwords')}"
    except PackageNotFoundError:  # tasks without words need none
        return None
