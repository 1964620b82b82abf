"""Tries that may not fit the device."""

from collections.abc import Callable
from typing import TypeVar

import jax

T = TypeVar("T")

# XLA has no error class of its own for this; on all backends the error's text contains
# one of these.
_SIGNS = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")


def unless_out_of_memory(call: Callable[[], T]) -> T | None:
    """Returns what `call` does, or None when the device's memory does not suffice.

    Any other failure is raised as it is.
    """
    try:
        # Calls return before the device has run them: without the wait a failed
        # allocation would be raised later, outside of this try.
        return jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        if not any(sign in str(error) for sign in _SIGNS):
            raise
    return None


def largest_batch(
    fits: Callable[[int], bool], *, start: int = 1, most: int = 2**16
) -> int:
    """Returns the largest batch that fits, to within an eighth; 0: none does.

    Doubles from `start` until one does not fit, then halves the step three times.

    Args:
      fits: tries one batch.
      start: the first batch.
      most: no batch above it is tried.
    """
    best, failed, batch = 0, None, start
    while failed is None and batch <= most:
        if fits(batch):
            best, batch = batch, 2 * batch
        else:
            failed = batch
    # Either all batches up to `most` fit, or not even the first one does.
    if failed is None or best == 0:
        return best
    # best fits and 2 best = failed does not: three halvings of the gap leave an eighth.
    step, last = best // 2, max(best // 8, 1)
    while step >= last:
        if best + step < failed and fits(best + step):
            best += step
        step //= 2
    return best
