"""What the config refuses, and how it says so."""

import pytest

from tests.variants.recurrent_transformer.switches import small


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 0}, "block must be at least 1, got 0"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"key_heads": 3}, "key_heads must divide heads, got 3 and 4"),
        ({"tile": 0}, "tile must be a multiple of block=1, got 0"),
        ({"block": 3, "tile": 4}, "tile must be a multiple of block=3, got 4"),
        ({"schedule": "naive", "tile": 4}, "the naive schedule has no tile, got 4"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(change, message):
    with pytest.raises(ValueError, match=f"RecurrentTransformerConfig: {message}"):
        small(**change)
