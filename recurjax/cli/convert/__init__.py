"""`recurjax convert ...`: checkpoints in and out, and models changed."""

from recurjax.cli.convert.command import run
from recurjax.cli.convert.surgery import read_heads

__all__ = ["read_heads", "run"]
