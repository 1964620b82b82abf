"""Block sizes that were measured on a device: a file that heuristics ask first.

`recurjax bench OP --tune FILE` writes the file, the environment variable RECURJAX_TILES
names it; without the variable nothing is read and every heuristic decides by itself. It
is asked while a program is traced: sizes change how fast a program is and how its sums
are rounded, never what it computes.

    {"sizes": [{"op": "recurrent_prefill", "backend": "triton", "device": "NVIDIA H100",
                "shape": {"batch": 512, ...}, "sizes": {"tile": 32, "rows": 128}}]}

More may stand beside these, such as times; it is not read.
"""

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pallas_kernels import target

VARIABLE = "RECURJAX_TILES"
_FIELDS = {"op": str, "backend": str, "device": str, "shape": dict, "sizes": dict}


def find(op: str, backend: str, shape: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes measured for a call on the target, {} where there are none.

    Args:
      shape: what of a call the best sizes depend on, as the op describes it.

    Raises:
      ValueError: the file that the variable names cannot be read, or is another.
    """
    file = os.environ.get(VARIABLE)
    if not file:
        return {}
    try:
        changed = os.stat(file).st_mtime_ns
        return _read(file, changed).get(_key(op, backend, shape), {})
    except OSError as error:
        raise ValueError(f"{VARIABLE}: {file} cannot be read: {error}") from error


def _key(op: str, backend: str, shape: Mapping[str, Any]) -> tuple:
    return op, backend, target.current().kind, tuple(sorted(shape.items()))


@lru_cache(maxsize=1)
def _read(file: str, changed: int) -> dict[tuple, dict[str, int]]:
    """Reads the file as it was at a time: one that was written since is read anew."""
    wrong = f'{VARIABLE}: {file} is not what "recurjax bench OP --tune FILE" writes: '
    try:
        entries = json.loads(Path(file).read_text("utf-8"))["sizes"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{wrong}no JSON object with "sizes"') from error
    if not isinstance(entries, list):
        raise ValueError(f'{wrong}"sizes" is no list')
    found = {}
    for number, entry in enumerate(entries):
        for name, kind in _FIELDS.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
                raise ValueError(f'{wrong}"sizes"[{number}] has no {name}')
        sizes = entry["sizes"]
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(
                    f'{wrong}"sizes"[{number}] has {name}={size!r}, wants 1 or more'
                )
        shape = tuple(sorted(entry["shape"].items()))
        try:
            found[entry["op"], entry["backend"], entry["device"], shape] = sizes
        except TypeError as error:
            raise ValueError(f'{wrong}"sizes"[{number}] has lists in shape') from error
    return found
