import dataclasses
import json
from typing import Literal

import pytest

from recurjax.config_json import from_json, json_differences, to_json
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.layers.position import Alibi, LearnedPositions
from recurjax.training.optimizers import Constant, LinearWarmdown
from tests.training.tiny_experiment import config


def through_text(value):
    return json.loads(json.dumps(to_json(value)))


@pytest.mark.parametrize("position", [None, Alibi(), LearnedPositions(length=99)])
@pytest.mark.parametrize("schedule", [Constant(), LinearWarmdown(warmdown=1.0)])
def test_every_member_of_a_union_comes_back_as_itself(position, schedule):
    experiment = config()
    attention = dataclasses.replace(experiment.model.stack.attention, position=position)
    stack = dataclasses.replace(
        experiment.model.stack, attention=attention, windows=(3, None)
    )
    model = dataclasses.replace(experiment.model, stack=stack)
    experiment = dataclasses.replace(experiment, model=model, schedule=schedule)
    assert from_json(Experiment, through_text(experiment)) == experiment


def changed(path, value):
    """The tiny experiment's JSON with one value replaced, or removed when None."""
    data = through_text(config())
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return data


WRONG = [
    ("training.stepz", 3, "config.training has no field stepz"),
    ("training.steps", None, "config.training lacks the field steps"),
    ("model.stack.width", "16", "config.model.stack.width must be of type int"),
    ("training.steps", 3.0, "config.training.steps must be of type int, got 3.0"),
    ("training.steps", True, "config.training.steps must be of type int, got True"),
    (
        "training.steps",
        2**64,
        r"steps must fit into 64 bits, got 1844674407370955161\d",
    ),
    ("optimizer.b1", "a", "config.optimizer.b1 must be of type float, got 'a'"),
    ("training.gradient_clip", "a", "config.training.gradient_clip must be of type"),
    ("schedule.type", "Cosin", "config.schedule.type must be one of Constant, Cosine"),
    ("schedule.type", [], r"config.schedule.type must be one of .*, got \[\]"),
    ("optimizer.type", "SGD", "config.optimizer.type must be one of AdamW, Adam"),
    ("training.type", "Cosine", "config.training.type must be TrainingConfig"),
    (
        "data.packing",
        "tight",
        "config.data.packing must be one of 'concat', 'best_fit'",
    ),
    ("model.stack.windows", 3, "config.model.stack.windows must be a list, got 3"),
    ("model.stack.windows", ["a"], r"config.model.stack.windows\[0\] must be of type"),
    ("training.profile", [1], "config.training.profile must be of type"),
    ("mesh", 3, "config.mesh must be an object for MeshConfig, got 3"),
    (
        "training.steps",
        0,
        r"config.training: TrainingConfig\.steps: must be >= 1, got 0",
    ),
]


@pytest.mark.parametrize("path, value, message", WRONG, ids=lambda x: str(x)[:30])
def test_what_does_not_fit_is_named_by_its_path(path, value, message):
    with pytest.raises(UserError, match=message):
        from_json(Experiment, changed(path, value))


def test_fields_with_a_default_may_be_missing():
    data = changed("training.accumulation", None)
    del data["mesh"]
    assert from_json(Experiment, data) == config()


def test_an_int_is_read_as_the_float_that_is_wanted():
    decoded = from_json(Experiment, changed("optimizer.learning_rate", 1))
    assert type(decoded.optimizer.learning_rate) is float


def test_a_value_that_json_lacks_is_not_written():
    @dataclasses.dataclass
    class Odd:
        names: list
        kind: Literal["a"] = "a"

    with pytest.raises(TypeError, match=r"tuples.* got list \['a'\]"):
        to_json(Odd(names=["a"]))


def test_of_two_classes_the_names_differ_and_not_all_their_fields():
    one = {"stack": {"type": "Rat", "chunk": 4}, "vocabulary": 9}
    other = {"stack": {"type": "Transformer", "heads": 2}, "vocabulary": 8}
    assert json_differences(one, other) == [
        "stack: Rat instead of Transformer",
        "vocabulary: 9 instead of 8",
    ]
