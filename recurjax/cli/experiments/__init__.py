"""`recurjax experiments` and `recurjax new`."""

from recurjax.cli.experiments.command import run

__all__ = ["run"]
