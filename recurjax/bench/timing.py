"""Times compiled functions."""

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One measurement.

    Attributes:
      name: `variant/mixer-or-schedule/pass`.
      shape: dimension letters and their sizes.
      dtype: dtype of the activations.
      median_ms, min_ms: over the repeats after warm-up, in milliseconds.
      tokens_per_s: tokens of one call over its median time.
    """

    name: str
    shape: Mapping[str, int]
    dtype: str
    median_ms: float
    min_ms: float
    tokens_per_s: float


@runtime_checkable
class Case(Protocol):
    """A bench of `recurjax bench`: a module of this folder, or an entry of a table."""

    def rows(self, *, large: bool, dtype: Any, repeats: int) -> Iterator[BenchRow]: ...

    def summary(self, rows: list[BenchRow]) -> str: ...


def row(
    name: str, shape: Mapping[str, int], dtype: str, times: list[float], *, tokens: int
) -> BenchRow:
    """Returns a row from the seconds that each repeat took."""
    # Rates come from the median, what a user will see; comparisons from the minimum,
    # which a busy machine disturbs least.
    median = statistics.median(times)
    return BenchRow(
        name=name,
        shape=dict(shape),
        dtype=dtype,
        median_ms=1e3 * median,
        min_ms=1e3 * min(times),
        tokens_per_s=tokens / median,
    )


def repeat(call: Callable[[], Any], *, repeats: int, warmup: int = 2) -> list[float]:
    """Returns the seconds of each of `repeats` calls, waiting for every result.

    Args:
      call: runs the program once; a program that uses its input up keeps it inside.
      repeats: how many calls are timed.
      warmup: calls before them; the first one compiles.
    """
    for _ in range(warmup):
        # jax returns before the device is done: only a wait for the result measures it.
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return times


def in_turns(
    calls: Mapping[Name, Callable[[], Any]], *, repeats: int, warmup: int = 2
) -> dict[Name, list[float]]:
    """Returns the seconds of each call's repeats, taken in turns: one of each a round.

    What slows a machine down for a while then slows all of them, and the ratios of
    their minima say more than those of one after another.

    Args:
      calls: by name, as of `repeat`.
      repeats: rounds.
      warmup: rounds before them.
    """
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(warmup):
        for call in calls.values():
            jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - began)
    return times
