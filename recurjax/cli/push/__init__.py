"""`recurjax push`, and the card that it sends."""

from recurjax.cli.push.command import run

__all__ = ["run"]
