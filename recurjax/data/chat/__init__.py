"""Conversations as tokens, by a model's own template, which runs in limits."""

from recurjax.data.chat.process import TemplateProcess
from recurjax.data.chat.program import CLOSED, OPENED
from recurjax.data.chat.templates import (
    MARK,
    ChatTemplate,
    Turn,
    compiled,
    encoded,
    load_template,
    marked,
    plain,
    unmarked,
)

__all__ = [
    "CLOSED",
    "MARK",
    "OPENED",
    "ChatTemplate",
    "TemplateProcess",
    "Turn",
    "compiled",
    "encoded",
    "load_template",
    "marked",
    "plain",
    "unmarked",
]
