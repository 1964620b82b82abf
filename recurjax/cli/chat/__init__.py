"""`recurjax chat RUN ...`: a talk in the terminal."""

from recurjax.cli.chat.command import run
from recurjax.cli.chat.talk import Talk, own_sampling

__all__ = ["Talk", "own_sampling", "run"]
