"""The papers' own checkpoints, in."""

from recurjax.convert.authors.checkpoint import as_trained, from_authors

__all__ = ["as_trained", "from_authors"]
