"""The metrics of /metrics: gauges of the engines, counters of finished requests."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from recurjax.serving.worker import AnswerStream, Worker

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counts requests; reads the engines' figures at each scrape."""

    def __init__(
        self, registry: CollectorRegistry, workers: Callable[[], dict[str, Worker]]
    ):
        self._workers = workers
        named = {"labelnames": ("model",), "registry": registry, "buckets": _SECONDS}
        self._first = Histogram(
            "recurjax_first_token_seconds", "from arrival to the first token", **named
        )
        self._token = Histogram(
            "recurjax_token_seconds", "a token after the first", **named
        )
        self._ends = Counter(
            "recurjax_requests",
            "requests by what ended them",
            labelnames=("model", "reason"),
            registry=registry,
        )
        # Each scrape calls `collect` below, so engines' figures are never stale.
        registry.register(self)

    def ended(self, model: str, stream: AnswerStream) -> None:
        """Counts a request that has ended."""
        request = stream.request
        if request is None:
            return
        self._ends.labels(model, request.reason or "").inc()
        if request.started is None:
            return
        self._first.labels(model).observe(request.started - request.submitted)
        # The first token's time is mostly the prompt's and is counted apart.
        later = len(request.tokens) - 1
        if later > 0:
            seconds = (request.ended or time.monotonic()) - request.started
            self._token.labels(model).observe(seconds / later)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields what the engines say of themselves."""
        now = {
            "slots": ("slots there are", lambda engine: engine.slots),
            "active_slots": ("slots that decode", lambda engine: engine.active),
            "waiting": ("requests without a slot", lambda engine: engine.waiting),
            "kept_states": (
                "states of texts kept",
                lambda engine: len(engine.prefix_cache),
            ),
            "kept_bytes": (
                "bytes of them",
                lambda engine: engine.prefix_cache.used_bytes,
            ),
        }
        sums = {
            "read_tokens": ("of prompts", lambda engine: engine.counts.read_tokens),
            "reused_tokens": (
                "of prompts, from kept states",
                lambda engine: engine.counts.reused_tokens,
            ),
            "new_tokens": ("made", lambda engine: engine.counts.new_tokens),
            "verified_tokens": (
                "drafted by loop 1 and verified by the full model",
                lambda engine: engine.counts.verified_tokens,
            ),
            "accepted_tokens": (
                "of those, accepted",
                lambda engine: engine.counts.accepted_tokens,
            ),
        }
        for kind, rows in ((GaugeMetricFamily, now), (CounterMetricFamily, sums)):
            for name, (what, value) in rows.items():
                family = kind(f"recurjax_{name}", what, labels=["model"])
                for model, worker in self._workers().items():
                    if worker.engine is not None:
                        family.add_metric([model], value(worker.engine))
                yield family
        exits = CounterMetricFamily(
            "recurjax_exits",
            "tokens by the loops that made them",
            labels=["model", "loops"],
        )
        for model, worker in self._workers().items():
            if worker.engine is not None:
                for loops, count in worker.engine.counts.exits.items():
                    exits.add_metric([model, str(loops)], count)
        yield exits
