"""Block sizes of any op: what is no size, and what a backend has no use for."""

from dataclasses import dataclass

import pytest

from pallas_kernels.block_sizes import GivenSizes
from pallas_kernels.powers import refusal_of_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes(GivenSizes):
    rows: int | None = None
    depth: int | None = None


def test_a_size_is_at_least_one():
    with pytest.raises(ValueError, match="Sizes: depth must be at least 1, got 0"):
        Sizes(depth=0)


def test_a_size_that_a_backend_has_no_use_for_is_refused():
    assert Sizes().refusal_beyond() is None
    assert Sizes(rows=4).refusal_beyond("rows", "depth") is None
    message = "takes of the block sizes only rows, got depth=2"
    assert Sizes(rows=4, depth=2).refusal_beyond("rows") == message
    assert Sizes(rows=4).refusal_beyond() == "takes of the block sizes none, got rows=4"


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (4, None),
        (32, None),
        (2, "rows must be a power of two from 4 to 32, got 2"),
        (48, "rows must be a power of two from 4 to 32, got 48"),
        (64, "rows must be a power of two from 4 to 32, got 64"),
    ],
)
def test_a_size_that_is_no_power_of_two_in_its_range_is_refused(size, told):
    assert refusal_of_size("rows", size, least=4, most=32) == told
