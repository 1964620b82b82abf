"""`recurjax evaluate RUN --exits`: what leaving the loops early costs on a text."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from recurjax.cli.evaluate.options import Evaluate
from recurjax.evaluation.exit_scores import (
    THRESHOLDS,
    ExitScore,
    cheapest,
    fit_exit_head,
    plot_exits,
    read_exit_head,
    score_exits,
    write_exit_head,
)
from recurjax.evaluation.rows import Row
from recurjax.training.run import LoadedRun
from recurjax.types import Batch


def of_exits(
    options: Evaluate,
    loaded: LoadedRun,
    batches: Callable[[], Iterator[Batch]],
    training_rows: Callable[[], Iterator[Batch]],
    *,
    text: str,
    length: int,
) -> tuple[dict[str, Any], list[Row]]:
    """Scores all rules; returns what is printed, and the rows that the run keeps.

    Args:
      training_rows: what an exit head is fitted on, if one is asked for.
      text, length: the name of what is scored, and tokens a row.
    """
    # One of an earlier call serves, until a new one takes its place in the run.
    head = read_exit_head(options.run)
    if options.fit_head is not None:
        head = fit_exit_head(loaded.model, training_rows())
        _say(f"an exit head was written to {write_exit_head(options.run, head)}")
    values: dict[str, Sequence[float]] = dict(THRESHOLDS)
    if options.thresholds is not None:
        values = dict.fromkeys(THRESHOLDS, options.thresholds)
    # Without a trained head there is nothing to compare with its thresholds.
    if head is None:
        del values["head"]
    scores = score_exits(
        loaded.model,
        batches,
        token_bytes=loaded.tokenizer.token_bytes,
        thresholds=values,
        head=head,
        report=_say,
    )
    told: dict[str, Any] = {"text": text, "length": length}
    told["exits"] = [_named(one) for one in scores]
    if options.most_loss is not None:
        chosen = cheapest(scores, options.most_loss)
        told["chosen"] = [_named(one) for one in chosen]
        for one in chosen:
            _say(
                f"{one.rule}:{one.threshold:g} stays within {options.most_loss} nats: "
                f"{one.loss:.4f} at {one.loops:.3f} loops a token"
            )
        if not chosen:
            _say(f"nothing stays within {options.most_loss} nats a token")
    if options.plot is not None:
        plot_exits(scores, options.plot)
    return told, _rows(scores, options, loaded, text, length)


def _named(one: ExitScore) -> dict[str, Any]:
    told = one._asdict()
    # The same for every rule; the run's rows have it.
    del told["tokens"]
    return told


def _rows(
    scores: Sequence[ExitScore],
    options: Evaluate,
    loaded: LoadedRun,
    text: str,
    length: int,
) -> list[Row]:
    # A part of a text is another text: how much was read belongs to the figure.
    settings: dict[str, Any] = {"length": length}
    for name in ("batches", "tokens"):
        if (given := getattr(options, name)) is not None:
            settings[name] = given
    return [
        Row(
            step=loaded.step,
            task=text,
            metric=metric,
            value=getattr(one, metric),
            n=one.tokens,
            # Written as `recurjax generate --exit` takes it.
            settings=settings | {"exit": f"{one.rule}:{one.threshold:g}"},
        )
        for one in scores
        for metric in ("loss", "bits_per_byte", "loops", "agreement")
    ]


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr)
