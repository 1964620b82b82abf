"""Shows how far `prepare` is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from recurjax.data.prepared.writing import Progress

_SECONDS_PER_LINE = 10.0


@contextmanager
def shown_progress(
    console: Console | None = None, *, doing: str = "tokenizing"
) -> Iterator[Callable[[Progress], None]]:
    """Yields the callback for `prepare`; shows documents, tokens, rate, time left."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with _bar(console, doing) as show:
            yield show
    else:
        with _lines(console, doing) as show:
            yield show


@contextmanager
def _bar(console: Console, doing: str) -> Iterator[Callable[[Progress], None]]:
    columns = (
        TextColumn(doing),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    begin = time.monotonic()
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", counts="")

        def show(now: Progress) -> None:
            # The rate is the average since the start, so that it does not jump.
            counts = _counts(now, time.monotonic() - begin)
            bar.update(task, total=now.total, completed=now.done, counts=counts)

        yield show


@contextmanager
def _lines(console: Console, doing: str) -> Iterator[Callable[[Progress], None]]:
    begin = last = time.monotonic()
    newest = shown = None

    def show(now: Progress) -> None:
        nonlocal last, newest
        newest, clock = now, time.monotonic()
        # Not at the corpus' end either: many documents are encoded after it was read.
        if clock - last >= _SECONDS_PER_LINE:
            last = clock
            write(now)

    def write(now: Progress) -> None:
        nonlocal shown
        shown = now
        share = f"{now.done / now.total:4.0%}" if now.total else ""
        counts = _counts(now, time.monotonic() - begin)
        console.print(f"{doing} {share} {counts}")

    yield show
    # The last state is shown once, however soon it came after the line before.
    if newest is not None and newest is not shown:
        write(newest)


def _counts(now: Progress, seconds: float) -> str:
    rate = now.tokens / seconds if seconds > 0 else 0.0
    return f"{now.documents:,} documents, {now.tokens:,} tokens, {rate:,.0f} tokens/s"
