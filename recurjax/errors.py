"""The exception for a user's mistakes, and how it lists several."""

from collections.abc import Sequence


class UserError(ValueError):
    """Says in one sentence what was wrong and what to do; the command line exits 2."""


def first_few(parts: Sequence[str], *, most: int = 6, separator: str = "; ") -> str:
    """Returns the first parts of a sentence and how many more there are.

    A model has hundreds of arrays, and a file from outside may have a million names.
    """
    rest = [f"and {len(parts) - most} more"] if len(parts) > most else []
    return separator.join([*parts[:most], *rest])
