"""An output directory that appears whole or not at all, and what stops it, said."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from recurjax.errors import UserError
from recurjax.files.atomic import new_folder


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Gives a directory aside, which takes the place `out` when the block ends well.

    Raises:
      UserError: something other than an empty folder is at `out`, or the disk does not
        take it.
    """
    try:
        with new_folder(out) as aside:
            yield aside
    # Safetensors raises a class of its own where the disk is full.
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{out.absolute()} could not be written: {reason}") from error
