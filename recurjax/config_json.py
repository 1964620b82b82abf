"""Configs as JSON and back, decoded from the type hints.

A dataclass becomes {"type": ClassName, field: value, ...}: where the field's type is a
union, the name tells the reader which member it was. Reading an
object that has an unknown field, lacks one without a default, or has a value of another
type is an error that names the field by its dotted path.
"""

import dataclasses
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from recurjax.errors import UserError

T = TypeVar("T")
_TOO_LARGE = 1 << 63
"""Whole numbers that no array can hold."""


def to_json(value: Any) -> Any:
    """Turns a config into what `json.dumps` writes; every dataclass names its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: to_json(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        "to_json: a config may hold dataclasses, tuples, numbers, strings "
        f"and None, got {type(value).__name__} {value!r}"
    )


def from_json(kind: type[T], data: Any, *, path: str = "config") -> T:
    """Rebuilds a config of type `wanted`.

    Raises:
      UserError: the data does not fit the types, or a config refuses its values.
    """
    return _decode(kind, data, path)


def json_differences(left: Any, other: Any, *, path: str = "") -> list[str]:
    """Lists fields that differ in two configs' JSON, as `a.b: 1 instead of 2`."""
    if (
        isinstance(left, dict)
        and isinstance(other, dict)
        and left.keys() == other.keys()
    ):
        differences = []
        for name in left:
            inner = f"{path}.{name}" if path else name
            differences += json_differences(left[name], other[name], path=inner)
        return differences
    # Fields of two classes have nothing to do with each other.
    if isinstance(left, dict) and isinstance(other, dict):
        named, of_other = left.get("type"), other.get("type")
        if named != of_other:
            return [f"{path}: {named} instead of {of_other}"]
    return [] if left == other else [f"{path}: {left!r} instead of {other!r}"]


def _decode(kind: Any, data: Any, path: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(kind), data, path)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data, path)
    if origin is tuple:
        return _decode_tuple(get_args(kind), data, path)
    if origin is Literal:
        if data not in get_args(kind):
            choices = ", ".join(map(repr, get_args(kind)))
            raise UserError(f"{path} must be one of {choices}, got {data!r}")
        return data
    if kind is type(None) and data is None:
        return None
    # JSON may write 1.0 as 1; the field's type decides. The other way round, 1.5 for an
    # integer, is an error.
    if kind is float and type(data) in (int, float):
        return float(data)
    if kind is int and type(data) is int and abs(data) >= _TOO_LARGE:
        raise UserError(f"{path} must fit into 64 bits, got {data}")
    # `type(...) is` and not isinstance: True would pass as an integer.
    if kind in (bool, int, str) and type(data) is kind:
        return data
    name = getattr(kind, "__name__", str(kind))
    raise UserError(f"{path} must be of type {name}, got {data!r}")


def _decode_union(members: tuple[Any, ...], data: Any, path: str) -> Any:
    if isinstance(data, dict):
        named = {m.__name__: m for m in members if _is_config(m)}
        kind = data.get("type")
        if not isinstance(kind, str) or kind not in named:
            raise UserError(
                f"{path}.type must be one of {', '.join(named)}, got {kind!r}"
            )
        return _decode(named[kind], data, path)
    if data is None and type(None) in members:
        return None
    # Of plain members the first that takes the value wins: `int | float` keeps 1 an
    # integer.
    plain = [
        m for m in members if not dataclasses.is_dataclass(m) and m is not type(None)
    ]
    for member in plain:
        try:
            return _decode(member, data, path)
        except UserError:
            continue
    raise UserError(f"{path} must be of type {_names(members)}, got {data!r}")


def _is_config(member: Any) -> bool:
    return dataclasses.is_dataclass(member)


def _decode_dataclass(kind: Any, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise UserError(f"{path} must be an object for {kind.__name__}, got {data!r}")
    data = dict(data)
    named = data.pop("type", kind.__name__)
    if named != kind.__name__:
        raise UserError(f"{path}.type must be {kind.__name__}, got {named!r}")
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise UserError(f"{path} has no field {', '.join(unknown)}")
    missing = sorted(n for n in set(fields) - set(data) if _required(fields[n]))
    if missing:
        raise UserError(f"{path} lacks the field {', '.join(missing)}")
    values = {n: _decode(hints[n], v, f"{path}.{n}") for n, v in data.items()}
    try:
        return kind(**values)
    # A config's own check says what is wrong; add the place in the file.
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _required(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _decode_tuple(members: tuple[Any, ...], data: Any, path: str) -> Any:
    if not isinstance(data, list):
        raise UserError(f"{path} must be a list, got {data!r}")
    # tuple[X, ...] has as many entries as the list.
    if len(members) == 2 and members[1] is Ellipsis:
        members = (members[0],) * len(data)
    if len(members) != len(data):
        raise UserError(f"{path} must have {len(members)} entries, got {len(data)}")
    return tuple(
        _decode(member, item, f"{path}[{i}]")
        for i, (member, item) in enumerate(zip(members, data, strict=True))
    )


def _names(members: tuple[Any, ...]) -> str:
    return " or ".join(
        "null" if m is type(None) else getattr(m, "__name__", str(m)) for m in members
    )
