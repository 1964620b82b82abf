"""What the op refuses, and how it says so."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_prefill import Rows, empty_cache, recurrent_prefill
from pallas_kernels.recurrent_prefill.api import check_call
from pallas_kernels.recurrent_prefill.call import (
    RecurrentPrefillCall,
    RecurrentPrefillOptions,
)
from pallas_kernels.recurrent_prefill.mosaic_tpu import backend as mosaic_tpu
from pallas_kernels.recurrent_prefill.triton import backend as triton
from tests.pallas_kernels.recurrent_prefill.layer_cases import Case, refusal
from tests.pallas_kernels.recurrent_prefill.layers import BATCH, LENGTH, spec, weights

LAYER = spec(dtype="float32")
BLOCKED = spec(dtype="float32", block=3)
FEWER_HEADS = spec(dtype="float32", heads=2, key_heads=2)


def call(layer=LAYER, *, cache=None, length=LENGTH, **options):
    w = weights(layer, layers=2, dtype="float32")
    cache = empty_cache(2, BATCH, 0, 8, layer) if cache is None else cache
    x = jnp.zeros((BATCH, length, 8))
    return jax.eval_shape(
        lambda x, w, cache: recurrent_prefill(x, w, cache, spec=layer, **options),
        x,
        w,
        cache,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": 0}, "needs tile of at least 1 position, got 0"),
        ({"schedule": "naive", "tile": 4}, 'no tile with schedule "naive", got 4'),
        ({"layer": BLOCKED, "tile": 4}, "multiple of spec.block=3, got 4"),
        ({"cache": empty_cache(2, BATCH, 5, 8, LAYER)}, "has slots, 5, got 13"),
        ({"cache": empty_cache(2, 3, 16, 8, LAYER)}, r"cache.keys of shape \(2, 2, 16"),
        ({"cache": empty_cache(1, BATCH, 16, 8, LAYER)}, "cache.keys of shape"),
        (
            {"cache": empty_cache(2, BATCH, 16, 8, FEWER_HEADS)},
            r"\(2, 2, 16, 4, 4\).* got",
        ),
        (
            {"layer": BLOCKED, "cache": empty_cache(2, BATCH, 16, 8, LAYER)},
            "cache.temporary_keys of shape",
        ),
        ({"rows": Rows(lengths=jnp.ones(3, int))}, r"lengths of shape \(2,\)"),
        ({"length": 0}, "T >= 1"),
    ],
)
def test_a_wrong_call_is_told_what_is_wanted(options, message):
    with pytest.raises(ValueError, match=f"recurrent_prefill: .*{message}"):
        call(**options)


def test_an_unknown_schedule_is_told_the_known_ones():
    w, cache = weights(LAYER, layers=2, dtype="float32"), empty_cache(2, 2, 0, 8, LAYER)
    x, rows = jnp.zeros((BATCH, 3, 8)), Rows()
    options = RecurrentPrefillOptions(spec=LAYER, schedule="diagonal")
    with pytest.raises(ValueError, match="'naive', 'prefix'.* got 'diagonal'"):
        check_call(RecurrentPrefillCall(x, w, cache, rows, options))


@pytest.mark.parametrize("backend", [triton, mosaic_tpu])
def test_the_default_order_has_one_name_on_every_backend(backend):
    """Requested by name or not, "prefix" meets the same refusals."""
    case = Case(positions=19)
    assert refusal(backend, case, schedule="prefix") == refusal(backend, case)
    assert "schedule" in str(refusal(backend, case, schedule="naive"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "layernorm"}, "norm must be one of .*'layer'.*, got 'layernorm'"),
        ({"qk_norm": None}, "qk_norm must be one of .*'none'.*, got None"),
        ({"activation": "relu"}, "activation must be one of .*, got 'relu'"),
    ],
)
def test_an_unknown_word_of_a_layer_is_told_the_known_ones(change, message):
    layer = dataclasses.replace(LAYER)
    for name, word in change.items():  # past the types that tests alone are held to
        object.__setattr__(layer, name, word)
    with pytest.raises(ValueError, match=f"LayerSpec: {message}"):
        layer.__post_init__()


def test_a_bias_of_a_gate_wants_the_gate():
    w = weights(LAYER, layers=2, dtype="float32")
    x, cache = jnp.zeros((BATCH, 3, 8)), empty_cache(2, BATCH, 0, 8, LAYER)
    w = w._replace(b_gate=jnp.zeros((2, 12)))
    with pytest.raises(ValueError, match="b_gate with a w_gate only"):
        recurrent_prefill(x, w, cache, spec=LAYER)
    w = w._replace(b_gate=None, b_q=jnp.zeros((2, 4, 4), int))
    with pytest.raises(ValueError, match="floating weights.b_q, got int32"):
        recurrent_prefill(x, w, cache, spec=LAYER)


def test_a_weight_of_another_shape_is_named():
    w = weights(LAYER, layers=2, dtype="float32")
    w = w._replace(w_down=w.w_down[:, :5])
    with pytest.raises(ValueError, match=r"weights.w_down of shape \(2, 12, 8\)"):
        recurrent_prefill(
            jnp.zeros((BATCH, 3, 8)), w, empty_cache(2, BATCH, 0, 8, LAYER), spec=LAYER
        )


def test_segments_are_for_training_only():
    rows = Rows(segments=jnp.zeros((BATCH, LENGTH), int))
    with pytest.raises(NotImplementedError, match="segments"):
        call(cache=empty_cache(2, BATCH, 16, 8, LAYER), rows=rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"key_heads": 3}, "key_heads must divide heads=4, got 3"),
        ({"block": 0}, "block must be at least 1"),
        ({"rope_base": 100.0, "rope_width": 3}, "rope_width must be even"),
    ],
)
def test_a_wrong_spec_names_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LAYER, **change)
