"""`recurjax generate RUN --prompt TEXT ...`: texts that a model goes on with."""

from recurjax.cli.generate.command import run

__all__ = ["run"]
