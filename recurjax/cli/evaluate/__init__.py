"""`recurjax evaluate RUN ...`: how well a model predicts, and on what."""

from recurjax.cli.evaluate.command import run

__all__ = ["run"]
