import jax
import pytest

from experiments.rat.device_memory import largest_batch, unless_out_of_memory


def fail(text):
    raise jax.errors.JaxRuntimeError(text)


def test_only_a_lack_of_memory_is_passed_over():
    assert unless_out_of_memory(lambda: 3) == 3
    text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte"
    assert unless_out_of_memory(lambda: fail(text)) is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        unless_out_of_memory(lambda: fail("INTERNAL: a fault"))


@pytest.mark.parametrize(
    ("limit", "found"), [(0, 0), (1, 1), (5, 5), (90, 88), (64, 64), (127, 120)]
)
def test_the_largest_batch_is_found_to_within_an_eighth(limit, found):
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= limit

    assert largest_batch(fits) == found
    assert len(tried) == len(set(tried))


def test_no_batch_above_the_most_is_tried():
    assert largest_batch(lambda batch: True, most=20) == 16
