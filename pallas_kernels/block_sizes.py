"""Block sizes that a caller sets: what all ops share.

An op's `BlockSizes` is a `GivenSizes` with a field for each size that one of its
backends takes. A backend chooses by its heuristic what the caller leaves out.
"""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSizes:
    """Sizes by name, each an int of at least 1, or None: the backend chooses."""

    def __post_init__(self):
        for name, size in self.given().items():
            if size < 1:
                kind = type(self).__name__
                raise ValueError(f"{kind}: {name} must be at least 1, got {size}")

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
