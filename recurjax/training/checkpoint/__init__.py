"""Checkpoints of a run: asynchronous, atomic, verified when they are read.

The one door is `Checkpoints`; see README.md for the rooms behind it.
"""

from recurjax.training.checkpoint.checkpoints import (
    Checkpoints,
    NoGoodCheckpoint,
    Restored,
)
from recurjax.training.checkpoint.manifest import named, nested

__all__ = ["Checkpoints", "NoGoodCheckpoint", "Restored", "named", "nested"]
