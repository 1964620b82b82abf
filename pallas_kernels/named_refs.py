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
      counts: number of references of the fields that hold a tuple of them, which may be
        0; every other field holds one.
    """
    rest = iter(refs)
    fields: Any = kind._fields  # type: ignore[attr-defined]
    cut = [
        tuple(islice(rest, counts[name])) if name in counts else next(rest)
        for name in fields
    ]
    assert next(rest, None) is None, f"{kind.__name__}: more references than fields"
    return kind(*cut)
