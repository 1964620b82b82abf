"""Progress of an evaluation: a bar on a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as Left

_SECONDS_PER_LINE = 10.0


@contextmanager
def progress_bar(
    name: str, total: int | None, *, console: Console | None = None
) -> Iterator[Callable[[int], None]]:
    """Yields what is called with the number of items done since the last call.

    What is done in less than ten seconds shows no line where there is no terminal, and
    of several processes only the first one shows anything.

    Args:
      name: name of the evaluation.
      total: items in all; None: nobody knows.
    """
    if jax.process_index() > 0:
        yield lambda done: None
        return
    console = console or Console(stderr=True)
    begin = last = time.monotonic()
    count = 0

    def rate() -> str:
        seconds = max(time.monotonic() - begin, 1e-9)
        return f"{count / seconds:,.1f} items/s"

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        Left(),
    )
    # A bar of its own thread would draw nothing where there is no terminal.
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total, rate="")

        def show(done: int) -> None:
            nonlocal count, last
            count += done
            bar.update(task, completed=count, rate=rate())
            clock = time.monotonic()
            if not console.is_terminal and clock - last >= _SECONDS_PER_LINE:
                last = clock
                of = "" if total is None else f" of {total:,}"
                console.print(f"{name}: {count:,}{of} items, {rate()}")

        yield show
