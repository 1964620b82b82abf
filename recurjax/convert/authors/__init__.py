"""The papers' own checkpoints, in."""

from recurjax.convert.authors.checkpoint import from_authors

__all__ = ["from_authors"]
