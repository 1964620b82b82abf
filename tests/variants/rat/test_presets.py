"""The paper's sizes, costs, and what configs refuse."""

import dataclasses
import json
from typing import get_args

import pytest

from recurjax.config_json import from_json, to_json
from recurjax.layers.position import LearnedPositions, Rope
from recurjax.model import ModelConfig, count_parameters
from recurjax.variants.rat import (
    AttentionMixerConfig,
    MambaMixerConfig,
    RatConfig,
    RatMixerConfig,
    RecurrentLayerConfig,
    presets,
)
from tests.variants.rat.switches import SWITCHES, WINDOW, rat, small

PAPER = {"width": 2048, "heads": 16}
RAT16 = presets.rat(**PAPER, chunk=16)
FULL = presets.attention(**PAPER)
SWA = presets.attention(**PAPER, window=1024)


@pytest.mark.parametrize(
    ("pattern", "millions"),
    [
        ([FULL], 1273.6),
        ([presets.rnn(**PAPER, length=4096)], 1273.6),
        ([FULL, SWA], 1273.6),
        ([RAT16], 1298.8),
        ([presets.reversed_rat(**PAPER, chunk=64, length=4096)], 1298.8),
        ([RAT16, SWA], 1286.2),
    ],
)
def test_the_papers_models_have_their_number_of_parameters(pattern, millions):
    stack = presets.stack(*pattern, layers=24, width=2048)
    count = count_parameters(ModelConfig(vocabulary=32000, stack=stack, tied_head=True))
    assert round(count.total / 1e6, 1) == millions


def test_rats_mixer_is_a_sixteenth_larger_than_attentions():
    assert RAT16.weights(2048) / FULL.weights(2048) == 1.0625


def test_flops_by_hand():
    config = presets.stack(RAT16, SWA, layers=4, width=2048)
    D, T = 2048, 4096
    weights = 2 * RAT16.weights(D) + 2 * 4 * D * D + 4 * 8 * D * D
    keys = 2 * (T // 16) + 2 * 1025
    assert config.flops_per_token(T) == 6 * weights + 12 * D * keys
    rnn = presets.stack(presets.rnn(**PAPER, length=T), layers=1, width=D)
    assert rnn.flops_per_token(T) == 6 * 12 * D * D  # does not grow with T


def test_low_rank_gates_count_their_two_factors():
    low = dataclasses.replace(RAT16, forget_rank=64, output_rank=32)
    saved = 2 * 2048 * 2048 - (64 + 32) * 4096
    assert low.weights(2048) == RAT16.weights(2048) - saved


@pytest.mark.parametrize("name", get_args(presets.Hybrid))
def test_a_hybrid_has_the_layers_that_it_names(name):
    places = presets.hybrid(name, width=64, heads=4, window=8)
    words = {
        MambaMixerConfig: "mamba",
        RatMixerConfig: "rat",
        RecurrentLayerConfig: "rt",
        AttentionMixerConfig: "attention",
    }
    found = [words[type(place)] for place in places]
    assert "_".join(found) == name.replace("window", "attention")
    windows = [getattr(place, "window", None) for place in places]
    assert (8 in windows) == ("window" in name)


def test_no_positions_keeps_those_of_window_layers():
    config = presets.without_positions(presets.stack(RAT16, SWA, layers=2, width=2048))
    assert config.pattern[0].position is None
    assert config.pattern[1] == SWA and isinstance(SWA.attention.position, Rope)
    full = presets.without_positions(presets.stack(FULL, layers=1, width=2048))
    assert full.pattern[0].attention.position is None
    size = {"width": 64, "heads": 4}
    both = presets.stack(
        presets.mamba(width=64), presets.recurrent(**size), layers=2, width=64
    )
    mamba, rt = presets.without_positions(both).pattern
    assert mamba == both.pattern[0] and rt.position is None


@pytest.mark.parametrize("name", SWITCHES)
def test_a_config_survives_json(name):
    config = SWITCHES[name]
    assert from_json(ModelConfig, json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rat(chunk=0), r"RatMixerConfig\.chunk: must be >= 1, got 0"),
        (lambda: rat(groups=3), "groups must divide heads=4, got 3"),
        (
            lambda: rat(forget_rank=0),
            r"RatMixerConfig\.forget_rank: must be >= 1, got 0",
        ),
        (lambda: rat(head_width=3), "must be an even number"),
        (
            lambda: small(rat(), WINDOW, layers=3),
            "number of mixers in pattern must divide",
        ),
        (lambda: small(layers=2), "number of mixers in pattern must divide"),
        (
            lambda: dataclasses.replace(WINDOW, window=-1),
            r"\.window: must be >= 0, got -1",
        ),
        (
            lambda: dataclasses.replace(
                WINDOW,
                attention=dataclasses.replace(
                    WINDOW.attention, position=LearnedPositions(length=4)
                ),
            ),
            "position must not be learned",
        ),
    ],
)
def test_a_wrong_config_is_an_error_that_names_it(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_no_sequence_is_too_long():
    assert RatConfig.max_length.fget(SWITCHES["rat"].stack) is None
