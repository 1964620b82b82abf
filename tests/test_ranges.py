import math

import pytest

from recurjax.errors import UserError
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.objective import NextToken
from recurjax.training.optimizers import Adam, AdamW, Constant, Cosine, LinearWarmdown

SIZES = {"steps": 1, "batch": 1, "length": 1}
REFUSED = [
    (AdamW, {"learning_rate": -1.0}, r"AdamW\.learning_rate: must be > 0, got -1.0"),
    (Adam, {"learning_rate": math.nan}, r"Adam\.learning_rate: must be finite"),
    (Adam, {"learning_rate": math.inf}, r"Adam\.learning_rate: must be finite"),
    (
        AdamW,
        {"learning_rate": 1.0, "b1": 2.0},
        r"AdamW\.b1: must be >= 0 and < 1, got 2.0",
    ),
    (
        AdamW,
        {"learning_rate": 1.0, "b2": 1.0},
        r"AdamW\.b2: must be >= 0 and < 1, got 1.0",
    ),
    (AdamW, {"learning_rate": 1.0, "eps": 0.0}, r"AdamW\.eps: must be > 0, got 0.0"),
    (
        AdamW,
        {"learning_rate": 1.0, "weight_decay": -0.1},
        r"AdamW\.weight_decay: must be >= 0, got -0.1",
    ),
    (Constant, {"start": -0.1}, r"Constant\.start: must be >= 0 and <= 1, got -0.1"),
    (Cosine, {"end": 1.5}, r"Cosine\.end: must be >= 0 and <= 1, got 1.5"),
    (
        LinearWarmdown,
        {"warmdown": math.nan},
        r"LinearWarmdown\.warmdown: must be finite",
    ),
    (NextToken, {"z_loss": -1.0}, r"NextToken\.z_loss: must be >= 0, got -1.0"),
    (
        TrainingConfig,
        SIZES | {"gradient_clip": math.nan},
        r"TrainingConfig\.gradient_clip: must be finite",
    ),
    (TrainingConfig, SIZES | {"seed": -1}, r"\.seed: must be >= 0 and < 2\^32, got -1"),
    (
        TrainingConfig,
        SIZES | {"seed": 2**32},
        r"\.seed: must be >= 0 and < 2\^32, got 4294967296",
    ),
    (
        EvaluationConfig,
        {"temperature": -1.0},
        r"EvaluationConfig\.temperature: must be >= 0, got -1.0",
    ),
    (
        EvaluationConfig,
        {"sample_tokens": 0},
        r"EvaluationConfig\.sample_tokens: must be >= 1, got 0",
    ),
]


@pytest.mark.parametrize("kind, values, sentence", REFUSED)
def test_a_value_outside_its_range_is_named(kind, values, sentence):
    with pytest.raises(UserError, match=sentence):
        kind(**values)


def test_the_largest_seed_is_one():
    assert TrainingConfig(**SIZES, seed=2**32 - 1).seed == 4294967295


def test_what_is_switched_off_has_no_range():
    assert TrainingConfig(**SIZES, gradient_clip=None).gradient_clip is None
