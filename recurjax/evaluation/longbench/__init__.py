"""LongBench: long documents, read by the model, its answers scored."""

from recurjax.evaluation.longbench.evaluate import evaluate_longbench, read_longbench
from recurjax.evaluation.longbench.tasks import TASKS

__all__ = ["TASKS", "evaluate_longbench", "read_longbench"]
