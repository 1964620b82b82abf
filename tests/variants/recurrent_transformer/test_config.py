"""What the config refuses, and how it says so."""

import pytest

from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.variants.recurrent_transformer.block import spec_of
from tests.variants.recurrent_transformer.switches import small


@pytest.mark.parametrize(("kind", "matrices"), [("gelu", 2), ("swiglu", 3)])
def test_flops_a_token_are_six_a_weight_and_pairs_are_projected_twice(kind, matrices):
    # Numbers that are all different, so that none can stand for another.
    sizes = {"width": 10, "heads": 6, "key_heads": 3, "head_width": 4, "layers": 5}
    stack = small(**sizes, mlp=MlpConfig(kind=kind, width=14)).stack
    queries_and_output = 2 * 10 * 6 * 4
    keys_and_values = 2 * 2 * 10 * 3 * 4  # of x and of z
    products = 6 * (queries_and_output + keys_and_values + matrices * 10 * 14)
    attention = 6 * 2 * 6 * 4 * 7  # logits and sums over 7 positions
    assert stack.flops_per_token(7) == 5 * (products + attention)


def test_each_norm_has_its_own_kind_and_eps():
    norm, own = NormConfig(kind="layer", eps=1e-3), NormConfig(eps=1e-5)
    spec = spec_of(small(norm=norm, qk_norm=own).stack, "float32")
    assert (spec.norm, spec.norm_eps) == ("layer", 1e-3)
    assert (spec.qk_norm, spec.qk_norm_eps) == ("rms", 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 0}, r"\.block: must be >= 1, got 0"),
        ({"layers": 0}, r"\.layers: must be >= 1, got 0"),
        ({"key_heads": 3}, ": key_heads must divide heads, got 3 and 4"),
        ({"tile": 0}, r"\.tile: must be >= 1, got 0"),
        ({"block": 3, "tile": 4}, ": tile must be a multiple of block=3, got 4"),
        (
            {"schedule": "naive", "tile": 4},
            ": tile must be None with the naive schedule, got 4",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_value(change, message):
    with pytest.raises(ValueError, match=f"^RecurrentTransformerConfig{message}"):
        small(**change)
