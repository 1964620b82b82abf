"""Every number of every config: what is not finite, or absurd, is refused in words."""

import dataclasses
import math
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from recurjax.cli.bench import Bench
from recurjax.cli.chat import ChatOptions
from recurjax.cli.convert.command import FromHf, FromTorch, ToTorch
from recurjax.cli.convert.surgery import (
    ToRecurFormer,
    ToRecursive,
    ToTransformer,
)
from recurjax.cli.data import PrepareOptions, ShowOptions
from recurjax.cli.evaluate.command import (
    EvaluateCore,
    EvaluateHarness,
    EvaluateRequests,
)
from recurjax.cli.evaluate.task import EvaluateTask
from recurjax.cli.evaluate.text import EvaluateExits, EvaluateText
from recurjax.cli.generate import GenerateOptions
from recurjax.cli.plan import PlanOptions
from recurjax.cli.serve import ServeOptions
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.inference.engine.config import EngineConfig, RequestSettings
from recurjax.inference.sampling import SamplingConfig
from recurjax.ranges import Range, field_ranges


def reachable(config: Any) -> list[Any]:
    """Lists the config classes that an experiment can be made of."""
    matches: list[Any] = []

    def walk(hint: Any) -> None:
        if dataclasses.is_dataclass(hint):
            if hint in matches:
                return
            matches.append(hint)
            for inner in get_type_hints(hint).values():
                walk(inner)
        for inner in get_args(hint):
            walk(inner)

    walk(config)
    return matches


def places(hint: Any, kind: type) -> list[Any]:
    """Returns functions that put a number of a kind where a field's type has one."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return [put for item in inner for put in places(item, kind)]
    if origin is tuple:
        return [lambda x, put=put: (put(x),) for put in places(inner[0], kind)]
    return [lambda x: x] if hint is kind else []


def fields_of(kind: type) -> list[Any]:
    return [
        pytest.param(config, field.name, put, id=f"{config.__name__}.{field.name}")
        for config in reachable(Experiment)
        for field in dataclasses.fields(config)
        for put in places(get_type_hints(config)[field.name], kind)
    ]


def refused(config: Any, name: str, value: Any, message: str | None = None) -> None:
    """Checks what a config says of one field, the first that it looks at.

    The others may be of no use, and `__init__` is not called: in tests it would check
    types before.
    """
    one = object.__new__(config)
    for field in dataclasses.fields(config):
        default = None if field.default is dataclasses.MISSING else field.default
        object.__setattr__(one, field.name, default)
    object.__setattr__(one, name, value)
    usual = rf"^{config.__name__}\.{name}: must be .*, got"
    with pytest.raises(UserError, match=message or usual):
        one.__post_init__()


def test_the_walk_finds_the_configs():
    names = {config.__name__ for config in reachable(Experiment)}
    assert {"SpikeConfig", "NormConfig", "Rope", "Alibi", "InitConfig"} <= names
    assert len(fields_of(float)) > 40 and len(fields_of(int)) > 100


@pytest.mark.parametrize("config, name, put", fields_of(float))
def test_a_number_that_is_not_finite_is_refused(config, name, put):
    for bad in (math.nan, math.inf, -math.inf, 1e39, -1e300):
        refused(config, name, put(bad))


@pytest.mark.parametrize("config, name, put", fields_of(int))
def test_an_integer_that_is_no_size_is_refused(config, name, put):
    wide = name in ("seed", "map_seed", "train_bytes")
    for bad in (2**63, -(2**63), 10**400) + (() if wide else (2**31, -(2**31))):
        refused(config, name, put(bad))
    for bad in (math.nan, math.inf):
        refused(config, name, put(bad))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_lies_in_no_range(bad):
    for bounds in ({}, {"least": 0}, {"above": 0}, {"most": 1}, {"below": 1}):
        assert bad not in Range(**bounds)


def test_a_range_is_written_as_a_reader_would():
    assert str(Range(least=1)) == ">= 1"
    assert str(Range(above=0, most=1)) == "> 0 and <= 1"
    assert str(Range(least=0, below=2**32)) == ">= 0 and < 2^32"
    assert str(Range(most=2**31 - 1)) == "<= 2^31 - 1"
    assert str(Range(above=-0.5, most=1000)) == "> -0.5 and <= 1000"


UNRANGED = {
    "AttentionConfig.scale": "of either sign, as the logits are",
    "ExitRule.threshold": "below the least score every token leaves after one loop",
    "LatentRecurrentTransformerConfig.value_gate_scale": "a factor of either sign",
}
"""Numbers that any finite value serves, by field."""


def configs() -> list[Any]:
    """Lists the configs of runs and engines, and the options of commands."""
    kinds = [Experiment, EngineConfig, RequestSettings, SamplingConfig]
    kinds += [Bench, ChatOptions, GenerateOptions, PlanOptions, PrepareOptions]
    kinds += [ServeOptions, ShowOptions, ToRecurFormer, ToRecursive, ToTransformer]
    kinds += [EvaluateCore, EvaluateExits, EvaluateHarness, EvaluateRequests]
    kinds += [EvaluateTask, EvaluateText, FromHf, FromTorch, ToTorch]
    return list(dict.fromkeys(kind for root in kinds for kind in reachable(root)))


def test_every_number_has_a_range_or_a_reason_for_none():
    unranged = {
        f"{config.__name__}.{field.name}"
        for config in configs()
        for field in dataclasses.fields(config)
        if places(get_type_hints(config)[field.name], int)
        or places(get_type_hints(config)[field.name], float)
        if field.name not in field_ranges(config)
    }
    assert unranged == set(UNRANGED)


def test_every_config_with_a_range_checks_it():
    for config in configs():
        for name, declared in field_ranges(config).items():
            below = min(x for x in (declared.least, declared.above) if x > -math.inf)
            hint = get_type_hints(config)[name]
            kind = int if places(hint, int) else float
            [put, *_] = places(hint, kind)
            refused(config, name, put(kind(below) - 1))
