"""Optimizers as configs, and learning rate schedules."""

from recurjax.training.optimizers.muon import MuonAdamW, RunSize
from recurjax.training.optimizers.optimizer import (
    Adam,
    AdamW,
    OptimizerConfig,
    build_optimizer,
)
from recurjax.training.optimizers.schedule import (
    Constant,
    Cosine,
    LinearWarmdown,
    Schedule,
    learning_rate,
)

__all__ = [
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "LinearWarmdown",
    "MuonAdamW",
    "OptimizerConfig",
    "RunSize",
    "Schedule",
    "build_optimizer",
    "learning_rate",
]
