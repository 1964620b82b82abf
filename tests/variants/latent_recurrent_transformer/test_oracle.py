"""Every switch against the equations in float64, written without the library's code."""

from functools import partial

import jax
import numpy as np
import pytest

from recurjax.types import Tokens
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from tests.compiling import QUICK_COMPILE
from tests.variants.latent_recurrent_transformer.oracle import logits_of
from tests.variants.latent_recurrent_transformer.switches import (
    LENGTH,
    SWITCHES,
    VOCABULARY,
    build,
    small,
)

FURTHER = {
    "residual only, two layers' memory": small(
        MemoryConfig(sources=(1, 2), keys=False, values=False, lags=(2,))
    ),
    "summed lags, layerwise, replacing values": small(
        MemoryConfig(
            sources=(2,),
            lags=(1, 3),
            combine="sum",
            projection="layerwise",
            keys=False,
            replace_layers=1,
        ),
        layers=4,
        windows="SLL",
    ),
}
"""Switches in addition to those of the laws."""

MODELS = SWITCHES | FURTHER
FAST = ("averaged sources, replacing",)


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def run(model, ids):
    return model(Tokens(ids), model.init_cache(len(ids), 0))[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in MODELS
    ],
)
def test_the_recurrence_is_its_equations(name):
    model = build(MODELS[name])
    ids = np.random.default_rng(2).integers(VOCABULARY, size=(2, LENGTH + 2))
    want = logits_of(model, ids)
    assert np.ptp(want) > 1
    np.testing.assert_allclose(run(model, ids.astype(np.int32)), want, atol=2e-4)


@pytest.mark.slow
def test_windows_follow_the_configured_length_whatever_a_call_has():
    model = build(SWITCHES["baseline"])
    ids = np.random.default_rng(3).integers(VOCABULARY, size=(1, LENGTH - 3))
    assert model.config.stack.layer_windows[0] == LENGTH // 2 < LENGTH - 4
    got = run(model, ids.astype(np.int32))
    np.testing.assert_allclose(got, logits_of(model, ids), atol=2e-4)
