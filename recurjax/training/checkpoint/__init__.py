"""Checkpoints of a run: asynchronous, atomic, verified when they are read.

`Checkpoints` is the public class; README.md maps the modules behind it.
"""

from recurjax.training.checkpoint.checkpoints import (
    Checkpoints,
    NoGoodCheckpoint,
    Restored,
)
from recurjax.training.checkpoint.manifest import named, nested

__all__ = ["Checkpoints", "NoGoodCheckpoint", "Restored", "named", "nested"]
