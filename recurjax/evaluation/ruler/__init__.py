"""RULER: needles in haystacks, variables to trace, words to count, at any length."""

from recurjax.evaluation.ruler.evaluate import evaluate_ruler
from recurjax.evaluation.ruler.scores import rat_share, string_match
from recurjax.evaluation.ruler.tasks import (
    NEEDLES,
    TASKS,
    RulerItem,
    RulerMaker,
    check_known,
)

__all__ = [
    "NEEDLES",
    "TASKS",
    "RulerItem",
    "RulerMaker",
    "check_known",
    "evaluate_ruler",
    "rat_share",
    "string_match",
]
