"""`recurjax train EXPERIMENT ...`: train, or resume."""

from recurjax.cli.train.command import run
from recurjax.cli.train.own_text import with_own_text

__all__ = ["run", "with_own_text"]
