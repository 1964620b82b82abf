"""Untrusted JSON: any fault in it becomes an error of one sentence.

A file that was cut off, damaged or made to harm can hold bytes that are not UTF-8,
lists nested ten thousand deep, numbers of a thousand digits and half characters. All of
that ends here, so that no reader meets it later, far from the file's name.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurjax.errors import UserError

DEEPEST = 64
"""Lists and objects inside each other; configs need about ten."""
MOST_DIGITS = 40
"""The most digits of an integer: states of random generators have 39 (128 bits)."""


def read_json(file: Path, what: str) -> Any:
    """Reads a file.

    Args:
      file: which.
      what: what it should be, for the message: "the index of shards".

    Raises:
      UserError: it cannot be read or is not JSON as `parse_json` takes it.
    """
    try:
        data = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what} {file} cannot be read: {reason}") from error
    return parse_json(data, f"{what} {file}")


def read_json_object(file: Path, what: str) -> dict[str, Any]:
    """Reads a file that holds an object, {...}; see `read_json`."""
    values = read_json(file, what)
    if not isinstance(values, dict):
        raise UserError(
            f"{what} {file} must hold a JSON object, not {type(values).__name__}"
        )
    return values


def parse_json(text: str | bytes | bytearray, where: str) -> Any:
    """Reads JSON as it comes from a file or a line of one.

    Args:
      text: bytes are taken as UTF-8.
      where: what to call it in messages.

    Raises:
      UserError: it is not UTF-8 or not JSON, is nested more than `DEEPEST` deep, has a
        number of more than `MOST_DIGITS` digits, or half a surrogate pair.
    """
    try:
        if isinstance(text, bytes | bytearray):
            text = text.decode("utf-8")
        values = json.loads(text, parse_int=_whole_number)
    except UnicodeDecodeError as error:
        at = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise UserError(f"{where} is not UTF-8 text: {at}") from error
    except RecursionError:
        raise UserError(f"{where} is JSON nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}") from error
    if _is_deeper(values, DEEPEST):
        raise UserError(f"{where} is JSON nested too deeply")
    # Written out it is a pair of escapes; half of one is not a character, and neither a
    # file's name nor a tokenizer can take it.
    escapes = "\\" in text and ("\\ud" in text or "\\uD" in text)
    if escapes and _has_half_character(values):
        raise UserError(f"{where} has an unpaired surrogate, one of \\ud800 to \\udfff")
    return values


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits")
    return int(digits)


def _is_deeper(values: Any, most: int) -> bool:
    # Level by level, for a recursion could itself be taken too deep.
    level = [values] if isinstance(values, (dict, list)) else []
    for _ in range(most):
        level = [
            part
            for parent in level
            for part in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(part, (dict, list))
        ]
    return bool(level)


def _has_half_character(values: Any) -> bool:
    try:
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def json_text(
    value: Any, *, indent: int | None = None, ensure_ascii: bool = True
) -> str:
    """Writes JSON; a number that is not finite becomes null, which is what JSON has.

    Python's own writer puts NaN and Infinity there, which other readers refuse.
    """
    return json.dumps(
        _finite(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return (
        [_finite(item) for item in value] if isinstance(value, list | tuple) else value
    )
