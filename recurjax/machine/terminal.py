"""Text on a terminal: columns, elapsed seconds, a model's text without its escapes."""

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

# Escape sequences move the cursor, rename windows and answer as if somebody typed.
_SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def write(text: str) -> None:
    """Writes a piece of text at once; on a terminal, control characters as pictures.

    A file or a pipe gets the text as it is.
    """
    sys.stdout.write(text.translate(_SHOWN) if sys.stdout.isatty() else text)
    # Python would hold short pieces back until a line is full.
    sys.stdout.flush()


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Returns rows of cells as lines of columns two spaces apart.

    Args:
      rows: with as many cells each.
      right: the columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


@contextmanager
def shown_elapsed(text: str, *, console: Console | None = None) -> Iterator[None]:
    """Shows a text and the seconds since the body began, and removes both at its end.

    Args:
      console: a terminal, or nothing is shown; None: standard error.
    """
    console = console or Console(stderr=True)
    columns = TextColumn(text), TimeElapsedColumn()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        bar.add_task("", total=None)
        yield
