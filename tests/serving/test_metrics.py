"""What /metrics tells is what the engines and the requests say."""

from collections import Counter
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from recurjax.serving.metrics import Metrics
from recurjax.serving.worker import AnswerStream


def engine(first: int):
    """An engine whose figures all differ."""

    class Cache:
        used_bytes = first + 4

        def __len__(self):
            return first + 3

    counts = SimpleNamespace(
        read_tokens=first + 5,
        reused_tokens=first + 6,
        new_tokens=first + 7,
        verified_tokens=first + 8,
        accepted_tokens=first + 9,
        exits=Counter({1: first + 10, 2: first + 11}),
    )
    return SimpleNamespace(
        slots=first,
        active=first + 1,
        waiting=first + 2,
        prefix_cache=Cache(),
        counts=counts,
    )


def counters(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line[0] != "#")
    return {name: float(value) for name, _, value in pairs if "created" not in name}


def test_each_figure_of_each_engine_is_told_by_its_name():
    workers = {
        "a": SimpleNamespace(engine=engine(10)),
        "b": SimpleNamespace(engine=engine(30)),
        "compiling": SimpleNamespace(engine=None),
    }
    registry = CollectorRegistry()
    Metrics(registry, lambda: workers)  # pyright: ignore[reportArgumentType]
    names = [
        *("slots", "active_slots", "waiting", "kept_states", "kept_bytes"),
        *("read_tokens_total", "reused_tokens_total", "new_tokens_total"),
        *("verified_tokens_total", "accepted_tokens_total"),
    ]
    want = {
        f'recurjax_{name}{{model="{model}"}}': first + place
        for model, first in (("a", 10), ("b", 30))
        for place, name in enumerate(names)
    }
    want |= {
        f'recurjax_exits_total{{loops="{loops}",model="{model}"}}': first + 9 + loops
        for model, first in (("a", 10), ("b", 30))
        for loops in (1, 2)
    }
    assert counters(registry) == want


def ended(**request) -> AnswerStream:
    stream = object.__new__(AnswerStream)
    stream.request = SimpleNamespace(**request) if request else None  # pyright: ignore
    return stream


def test_requests_are_counted_by_their_ends_and_timed_by_token():
    registry = CollectorRegistry()
    metrics = Metrics(registry, lambda: {})
    whole = {"submitted": 1.0, "started": 3.0, "ended": 7.0, "reason": "stop"}
    metrics.ended("m", ended(tokens=[1] * 5, **whole))
    # One token has no time but the first's; what never started has none.
    metrics.ended("m", ended(tokens=[1], **whole | {"started": 1.5}))
    none = {"submitted": 1.0, "started": None, "ended": 2.0, "reason": "cancelled"}
    metrics.ended("m", ended(tokens=[], **none))
    metrics.ended("m", ended())
    figures = counters(registry)
    assert figures['recurjax_requests_total{model="m",reason="stop"}'] == 2
    assert figures['recurjax_requests_total{model="m",reason="cancelled"}'] == 1
    assert figures['recurjax_first_token_seconds_sum{model="m"}'] == 2.0 + 0.5
    assert figures['recurjax_first_token_seconds_count{model="m"}'] == 2
    assert figures['recurjax_token_seconds_sum{model="m"}'] == (7.0 - 3.0) / 4
    assert figures['recurjax_token_seconds_count{model="m"}'] == 1
