"""An output directory that appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from recurjax.errors import UserError


def refuse_existing(out: Path) -> None:
    """Raises UserError if something other than an empty folder is at `out`."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists already: choose another place or remove it")


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Gives a directory aside, which takes the place `out` when the block ends well.

    Raises:
      UserError: something other than an empty folder is at `out`, or the disk does not
        take it.
    """
    refuse_existing(out)
    out = out.absolute()
    aside = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        yield aside
        os.rename(aside, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{out} could not be written: {reason}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
