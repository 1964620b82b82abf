import dataclasses

import pytest

from recurjax.errors import UserError
from recurjax.experiment import (
    differences,
    read_experiment,
    write_experiment,
)
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.position import LearnedPositions
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from tests.training.tiny_experiment import changed, config
from tests.variants.latent_recurrent_transformer.switches import small


def test_a_written_experiment_is_read_back(tmp_path):
    write_experiment(config(), tmp_path / "config.json")
    assert read_experiment(tmp_path / "config.json") == config()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_config_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(
        UserError, match="is not a run directory: it has no config.json"
    ):
        read_experiment(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"type": ')
    with pytest.raises(UserError, match="config.json is not valid JSON"):
        read_experiment(tmp_path / "config.json")


def test_differences_name_the_fields_and_both_values():
    other = changed(config(), training={"steps": 13}, optimizer={"b1": 0.8})
    assert differences(other, config()) == [
        "training.steps: 13 instead of 12",
        "optimizer.b1: 0.8 instead of 0.9",
    ]
    assert differences(config(), config()) == []


@pytest.mark.parametrize("name", ["", "..", "a/b", "/a"])
def test_a_name_must_fit_a_directory(name):
    with pytest.raises(ValueError, match="name must be usable as the name of a dir"):
        dataclasses.replace(config(), name=name)


LEARNED = LearnedPositions(length=8)
ATTENTION = dataclasses.replace(config().model.stack.attention, position=LEARNED)
RECURRENT = RecurrentTransformerConfig(
    layers=1,
    width=16,
    heads=2,
    key_heads=2,
    head_width=8,
    mlp=MlpConfig(width=16),
    position=LEARNED,
)


@pytest.mark.parametrize(
    ("stack", "field"),
    [
        (
            dataclasses.replace(config().model.stack, attention=ATTENTION),
            "model.stack.attention.position.length",
        ),
        (RECURRENT, "model.stack.position.length"),
    ],
)
def test_rows_longer_than_the_learned_positions_are_refused(stack, field):
    """The error names the field, wherever the variant has it."""
    message = f"training.length 16 exceeds .* 8 learned .* or raise {field}$"
    with pytest.raises(ValueError, match=message):
        changed(config(), model={"stack": stack})


def test_another_length_than_the_windows_is_refused():
    """The windows of the latent backbone come from its own copy of the length."""
    latent = small(None)
    run = changed(config(), training={"length": latent.stack.length})
    run = dataclasses.replace(run, model=latent)
    assert run.training.length == 9
    message = "training.length 18 must equal model.stack.length 9, .* set both"
    with pytest.raises(ValueError, match=message):
        changed(run, training={"length": 18})
