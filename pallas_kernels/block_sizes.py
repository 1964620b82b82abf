"""Block sizes that a caller gives or a device was measured for: what all ops share.

An op's `BlockSizes` is a `GivenSizes` with a field for each size that one of its
backends takes. A backend runs with the caller's, else with those that were measured for
such calls on the device, else with its heuristic's.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pallas_kernels import measured_sizes

S = TypeVar("S", bound="GivenSizes")


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSizes:
    """Sizes by name, each an int of at least 1, or None: the backend chooses."""

    def __post_init__(self):
        for name, size in self.given().items():
            if size < 1:
                kind = type(self).__name__
                raise ValueError(f"{kind}: {name} must be at least 1, got {size}")

    @classmethod
    def measured(cls: type[S], op: str, sizes: Mapping[str, int]) -> S:
        """Returns what a file has for a call of the op.

        Raises:
          ValueError: it has a size that the op has not.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        others = sorted(sizes.keys() - known)
        if others:
            raise ValueError(
                f"{measured_sizes.VARIABLE}: {op} has no block sizes "
                f"{', '.join(others)}"
            )
        return cls(**sizes)

    def given(self) -> dict[str, int]:
        """Returns those that are set, by name."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: size for name, size in named.items() if size is not None}

    def refusal_beyond(self, *taken: str) -> str | None:
        """Returns which size is given that a backend has no use for, None if none."""
        for name, size in self.given().items():
            if name not in taken:
                known = f"only {' and '.join(taken)}" if taken else "none"
                return f"takes of the block sizes {known}, got {name}={size}"
        return None


def choose(
    blocks: S | None, kind: type[S], *, op: str, backend: str, shape: Mapping[str, Any]
) -> S:
    """Returns the sizes that the caller gave, else measured ones; the rest is None.

    What was measured belongs together: where the caller gives anything, the rest is the
    heuristic's.

    Args:
      shape: the class of the call: what its best sizes depend on.
    """
    if blocks is not None:
        return blocks
    return kind.measured(op, measured_sizes.find(op, backend, shape))
