"""Checkpoints of a run: asynchronous, atomic, verified when they are read.

The one door is `Checkpoints`; see README.md for the rooms behind it.
"""

from recurjax.training.checkpoint.checkpoints import (
    Checkpoints,
    NoGoodCheckpoint,
    Restored,
)

__all__ = ["Checkpoints", "NoGoodCheckpoint", "Restored"]
