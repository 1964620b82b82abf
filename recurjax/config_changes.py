"""Fields of configs that moved or went since a version, in one table.

config.json says which version wrote it. What an older one wrote is brought up to date
here before it is decoded, so that the configs themselves know their present fields
only; what a newer one wrote is refused by its version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from recurjax.errors import UserError
from recurjax.version import refuse_newer

VERSION_KEY = "recurjax"
"""In config.json beside the experiment's fields: the version that wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A field of a config class that has another name, another place, or is no more.

    Attributes:
      version: the first without the old field.
      type: the class, as JSON names it.
      field: the old field.
      to: its place now, dotted from the same object ("stack.remat"); None: it went.
      only: the one value that the field may have had where it went, as what it did is
        done no more; None: any.
    """

    version: str
    type: str
    field: str
    to: str | None = None
    only: Any = None


CHANGES: tuple[Change, ...] = ()
"""Oldest first; a row is added in the commit that moves the field."""


def brought_up_to_date(
    data: Any, file: Path, *, changes: Sequence[Change] | None = None
) -> Any:
    """Returns a config's JSON with the fields of this version, less the version.

    Args:
      data: what the file holds; a file without a version is older than all changes.
      file: for messages.
      changes: None: CHANGES.

    Raises:
      UserError: a newer version wrote it, or a field that went had a value that this
        version cannot do.
    """
    if not isinstance(data, dict):
        return data
    data = dict(data)
    version = data.pop(VERSION_KEY, "")
    refuse_newer(version, file)
    written_by = Version(version or "0")
    for change in CHANGES if changes is None else changes:
        if written_by < Version(change.version):
            data = _changed(data, change, file)
    return data


def _changed(value: Any, change: Change, file: Path) -> Any:
    if isinstance(value, list):
        return [_changed(item, change, file) for item in value]
    if not isinstance(value, dict):
        return value
    # Inner objects first: a field may move out of one that moved itself.
    value = {name: _changed(item, change, file) for name, item in value.items()}
    if value.get("type") != change.type or change.field not in value:
        return value
    old = value.pop(change.field)
    if change.to is not None:
        *path, last = change.to.split(".")
        inner = value
        for name in path:
            inner = inner[name]
        inner[last] = old
    elif change.only is not None and old != change.only:
        raise UserError(
            f"{file}: {change.type}.{change.field} was {old!r}; since version "
            f"{change.version} only {change.only!r} can be done"
        )
    return value
