"""The exception for a user's mistakes, and how it lists several."""

from collections.abc import Sequence


class UserError(ValueError):
    """Says in one sentence what was wrong and what to do; the command line exits 2."""

    def __str__(self) -> str:
        """Returns the sentence, on one line if it quotes the error it was raised from.

        Libraries (Arrow, TensorStore) write errors of several lines.
        """
        text = super().__str__()
        return text if self.__cause__ is None else " ".join(text.split())


def first_few(parts: Sequence[str], *, most: int = 6, separator: str = "; ") -> str:
    """Returns the first parts of a sentence and how many more there are.

    A model has hundreds of arrays, and a file from outside may have a million names.
    """
    rest = [f"and {len(parts) - most} more"] if len(parts) > most else []
    return separator.join([*parts[:most], *rest])
