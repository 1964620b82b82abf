"""A model as evaluations ask it: scored or generating, with a journal."""

from recurjax.evaluation.asking.answering import GREEDY, Question
from recurjax.evaluation.asking.journal import Journal
from recurjax.evaluation.asking.remembered import remembered_scores
from recurjax.evaluation.asking.scoring import (
    Pair,
    PairScore,
    Reading,
    Score,
    Scorer,
    rolling,
)
from recurjax.evaluation.asking.shown import shown_items
from recurjax.evaluation.asking.subject import Subject

__all__ = [
    "GREEDY",
    "Journal",
    "Pair",
    "PairScore",
    "Question",
    "Reading",
    "Score",
    "Scorer",
    "Subject",
    "remembered_scores",
    "rolling",
    "shown_items",
]
