"""A kernel's references by name: Pallas hands a body one flat list of them."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeVar

Named = TypeVar("Named", bound=tuple)


def by_name(kind: type[Named], refs: Sequence[Any], **counts: int) -> Named:
    """Cuts a flat list of references into the fields of a NamedTuple, in their order.

    Args:
      kind: the NamedTuple.
      refs: inputs, then outputs, then scratch, as Pallas gives them.
      counts: of the fields that hold a tuple of so many references, perhaps none; a
        field that is not named here holds one.
    """
    rest = iter(refs)
    fields: Any = kind._fields  # type: ignore[attr-defined]
    cut = [
        tuple(islice(rest, counts[name])) if name in counts else next(rest)
        for name in fields
    ]
    assert next(rest, None) is None, f"{kind.__name__}: more references than fields"
    return kind(*cut)
