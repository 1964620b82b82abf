"""Continues many requests at once, each with the result it would have alone."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.exits import ExitHead
from recurjax.inference.continuation import Continuation
from recurjax.inference.engine.config import (
    MOST_STOPS,
    Counts,
    EngineConfig,
    Request,
    RequestSettings,
)
from recurjax.inference.engine.memory import row_bytes, slots_that_fit
from recurjax.inference.engine.prefix_cache import PrefixCache
from recurjax.inference.engine.programs import Programs, Report
from recurjax.inference.engine.slots import (
    NO_TOKEN,
    Outputs,
    SamplingParams,
    Slots,
    sampling_params,
)
from recurjax.inference.engine.strategy import choose_strategy, refuse_engine
from recurjax.inference.sampling import NOT_FINITE
from recurjax.model import Decoder
from recurjax.types import Array, Cache


@dataclass(kw_only=True, slots=True)
class _Reading:
    """A prompt that is partly read."""

    request: Request
    cache: Cache
    last: Array | None
    at: int
    row: int
    reports: list[Report] = field(default_factory=list)


class _Admitted(NamedTuple):
    """Requests whose prompts were read, their first tokens still on the device.

    Attributes:
      reports: reports of the prefill calls.
      places: slot of each request, and its row in `outputs`.
    """

    outputs: Outputs
    reports: list[Report]
    places: list[tuple[Request, int, int]]


class _Call(NamedTuple):
    """A call of the decode program, and the requests in its slots."""

    rows: list[Request | None]
    outputs: Outputs
    steps: Array


class Engine:
    """Slots for requests, and the queue of those that wait for one.

        engine = Engine(model, EngineConfig(slots=8, length=2048), tokenizer=tokenizer)
        request = engine.submit(tokenizer.encode("To be,"), RequestSettings())
        while not request.done:
            engine.step()

    One thread calls it. What it does next depends on the calls alone, never on a clock,
    so that all processes of a mesh do the same. A request's tokens depend on its prompt
    and settings only (up to the rounding of matrix products): not on the other
    requests, on its slot, or on whether a kept state saved reading a part of its
    prompt.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos: int | None = None,
        exit_head: ExitHead | None = None,
        mesh: Mesh | None = None,
    ):
        """Prepares slots; each program is compiled when it is first needed.

        Args:
          model: any variant, with weights in the compute dtype, see `in_compute_dtype`.
          tokenizer: for texts and stop strings; its EOS is the engine's.
          eos: without a tokenizer, the token that ends a request.
          exit_head: exit head of the rule "head".
          mesh: mesh of the model; its data and fsdp axes shard the slots if they divide
            them. Each process must make the same calls in the same order, and gets all
            tokens. None: one device.

        Raises:
          UserError: the model reads no prompts in this way, has fewer positions than
            `length` or no loops to leave early, or the slots do not fit into memory.
        """
        reason = refuse_engine(model, config, tokenizer=tokenizer, mesh=mesh)
        if reason is not None:
            raise UserError(reason)
        strategy = choose_strategy(model, config, exit_head)
        self.config, self.slots = (
            config,
            slots_that_fit(model, config, strategy, mesh=mesh),
        )
        # Every loop from the start: who reads it while it counts finds the same keys.
        exits = dict.fromkeys(range(1, strategy.loops(model) + 1), 0)
        self.counts = Counts(ended={}, exits=exits)
        self.prefix_cache = PrefixCache(int(config.states_gib * 2**30))
        self._vocabulary = model.config.vocabulary
        self._model, self._strategy = model, strategy
        self._threshold = 1.0 if config.exit is None else config.exit.threshold
        self._tokenizer = tokenizer
        self._eos = eos if tokenizer is None else tokenizer.eos
        self._programs = Programs(
            model,
            config,
            strategy=strategy,
            slots=self.slots,
            head=exit_head,
            mesh=mesh,
        )
        # None: all slots are free. The first prompts make them in their own program.
        self._state: Slots | None = None
        self._texts: dict[Request, Continuation] = {}
        self._queue: deque[Request] = deque()
        self._reading: _Reading | None = None
        self._rows: list[Request | None] = [None] * self.slots
        # Rows that ended since the last call: the device learns of them with the next
        # one.
        self._ended = np.zeros(self.slots, bool)

    @property
    def row_bytes(self) -> int:
        """Bytes that one slot takes."""
        return row_bytes(self._model, self.config.length, self._strategy)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return self._programs.compile_seconds

    def compile(self) -> None:
        """Compiles all programs now, so that no request waits for one."""
        self._programs.compile()
        if self._state is None:
            self._state = self._programs.empty()

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._queue) or self._reading is not None or self.active > 0

    @property
    def active(self) -> int:
        """How many slots hold a request that continues."""
        return sum(request is not None for request in self._rows)

    @property
    def waiting(self) -> int:
        """How many requests have no slot yet."""
        return len(self._queue)

    def submit(
        self,
        prompt: Sequence[int] | Int[np.ndarray, " T"],
        settings: RequestSettings | None = None,
    ) -> Request:
        """Puts a request at the end of the queue; `step` works on it.

        Raises:
          UserError: an empty prompt, tokens that the model does not have, or more than
            a slot holds; stop strings without a tokenizer; too many stop tokens.
        """
        settings = RequestSettings() if settings is None else settings
        # As wide as they come, so that an id of another model cannot wrap into range.
        ids = np.asarray(prompt)
        self.check(ids, settings)
        request = Request(ids.astype(np.int32), settings)
        if self._tokenizer is not None:
            self._texts[request] = Continuation(
                self._tokenizer, request.prompt, settings.stop
            )
        self.counts.submitted += 1
        self._queue.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is; its slot is free for the next step."""
        if request.done:
            return
        if request in self._queue:
            self._queue.remove(request)
        elif self._reading is not None and self._reading.request is request:
            self._reading = None
        else:
            self._free(self._rows.index(request))
        self._finish(request, "cancelled")

    def step(self) -> list[Request]:
        """Reads prompts into free slots, then draws some tokens for every slot.

        Returns:
          The requests that have new tokens or have ended.
        """
        firsts = self._fill()
        # Decoding is under way while the host looks at the first tokens.
        call = self._launch()
        news = [*self._hand_out(firsts), *self._collect(call)]
        return list(dict.fromkeys(news))

    def read(self) -> list[Request]:
        """Runs the first half of a step; returns requests with their first token."""
        return self._hand_out(self._fill())

    def decode(self) -> list[Request]:
        """Runs the second half of a step."""
        return self._collect(self._launch())

    def check(
        self, ids: np.ndarray, settings: RequestSettings, *, name: str = "the prompt"
    ) -> None:
        """Raises UserError where `submit` would; any thread may call it."""
        if ids.ndim != 1 or ids.size == 0:
            raise UserError(f"{name} has no tokens: give it at least one")
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self._vocabulary:
            raise UserError(
                f"{name} has tokens from {ids.min()} to {ids.max()} and the "
                f"model's are 0 to {self._vocabulary - 1}: encode it with the "
                "model's own tokenizer"
            )
        needed = ids.size + settings.max_new_tokens - 1  # the last one is never read
        if needed > self.config.length:
            raise UserError(
                f"{name} has {ids.size} tokens and needs {needed} positions for "
                f"{settings.max_new_tokens} new ones, but a slot has "
                f"{self.config.length}: shorten it or request fewer new tokens"
            )
        if self.config.missing == "verify" and settings.sampling.temperature > 0:
            raise UserError(
                "missing verify decodes greedily only: set temperature 0, or "
                "build the engine with another missing"
            )
        if settings.threshold is not None and self.config.exit is None:
            raise UserError(
                "threshold is for an engine with early exits: leave it out, or "
                "build the engine with exit"
            )
        most = max(self._programs.adapters - 1, 0)
        if settings.adapter > most:
            raise UserError(
                f"adapter must be a number up to {most}, the model's adapters, got "
                f"{settings.adapter}"
            )
        if settings.stop and self._tokenizer is None:
            raise UserError("stop strings need a tokenizer: give stop_tokens instead")
        if len(self._stops(settings)) > MOST_STOPS:
            raise UserError(
                f"a request may have at most {MOST_STOPS} tokens that end it, got "
                f"{len(self._stops(settings))}: remove some"
            )
        if any(not 0 < n <= ids.size for n in settings.keep):
            raise UserError(
                f"keep must be lengths from 1 to the prompt's {ids.size} tokens, "
                f"got {settings.keep}"
            )

    def _stops(self, settings: RequestSettings) -> set[int]:
        stops = set(settings.stop_tokens)
        # A request may continue past the end of a text, for benchmarks.
        if self._eos is not None and not settings.ignore_eos:
            stops.add(self._eos)
        return stops

    def _fill(self) -> list[_Admitted]:
        """Reads prompts, as much as one step may; returns what was admitted."""
        admitted, budget = [], self.config.prefill_tokens
        while True:
            if self._reading is None:
                if not self._queue or None not in self._rows:
                    return admitted
                together, cost = self._together()
                if cost > budget:
                    return admitted
                if together:
                    budget -= cost
                    admitted.append(self._read_together(together))
                    continue
                self._reading = self._begin(self._queue.popleft())
            reading = self._reading
            if reading.at < len(reading.request.prompt):
                count = self._piece(reading)
                if count > budget:
                    return admitted
                budget -= count
                self._read(reading, count)
            if reading.at == len(reading.request.prompt):
                admitted.append(self._admit(reading))
                self._reading = None

    def _together(self) -> tuple[list[Request], int]:
        """Returns requests that one call reads into free slots, and its tokens.

        None where a call for each is faster, or a prompt takes several pieces.
        """
        waiting = list(islice(self._queue, self._rows.count(None)))
        longest = max(len(request.prompt) for request in waiting)
        if longest > self._programs.widths[-1]:
            return [], 0
        width = self._programs.width_of(longest)
        if not self._programs.reads_together(len(waiting), width):
            return [], 0
        return waiting, self.slots * width

    def _read_together(self, requests: list[Request]) -> _Admitted:
        free = [row for row, request in enumerate(self._rows) if request is None]
        rows = dict(zip(free, requests, strict=False))
        self._state, outputs, report = self._programs.read_together(
            self._state,
            {
                row: (request.prompt, self._params(request))
                for row, request in rows.items()
            },
        )
        for row, request in rows.items():
            self._queue.popleft()
            self._rows[row], self._ended[row] = request, False
            self.counts.read_tokens += len(request.prompt)
        places = [(request, row, row) for row, request in rows.items()]
        return _Admitted(outputs, [report], places)

    def _begin(self, request: Request) -> _Reading:
        """Starts from the longest prefix of the prompt whose state is kept."""
        # The caller has checked that a row is free.
        row = self._rows.index(None)
        cache, adapter = self.prefix_cache, request.settings.adapter
        prefix = cache.find(request.prompt, adapter) if len(cache) else None
        if prefix is None:
            cache, last, at = self._programs.fresh(), None, 0
        else:
            # Donate a state that further pieces continue, but not a complete one.
            complete = prefix.length == len(request.prompt)
            cache = prefix.cache if complete else self._programs.copy(prefix.cache)
            last, at = prefix.last, prefix.length
            # Read off the state where the kept beginning ends.
            request.reused = at
            self.counts.reused_tokens += at
        return _Reading(request=request, cache=cache, last=last, at=at, row=row)

    def _piece(self, reading: _Reading) -> int:
        """Counts the tokens of the next piece.

        The pieces of a prompt depend on the prompt alone, not on the tokens left in a
        step, so its result is bit-identical next to any other requests.
        """
        # Pieces end at multiples of the largest width, and where a beginning is kept.
        size, at = self._programs.widths[-1], reading.at
        ends = [len(reading.request.prompt), size * (at // size + 1)]
        if self.config.states_gib:
            ends += [mark for mark in reading.request.settings.keep if mark > at]
        count = min(ends) - at
        # Sweeps are near the exact state by as much as a piece is long.
        if self.config.prefill != "exact":
            return count
        return self._programs.first_part(count)

    def _read(self, reading: _Reading, count: int) -> None:
        request, end = reading.request, reading.at + count
        ids, adapter = request.prompt[reading.at : end], request.settings.adapter
        reading.cache, reading.last, report = self._programs.read(
            reading.cache, ids, adapter=adapter
        )
        reading.reports.append(report)
        reading.at = end
        self.counts.read_tokens += count
        if self.config.states_gib and end in request.settings.keep:
            beginning = request.prompt[:end]
            if not self.prefix_cache.has(beginning, adapter):
                copy = self._programs.copy(reading.cache)
                self.prefix_cache.put(beginning, copy, reading.last, adapter=adapter)

    def _admit(self, reading: _Reading) -> _Admitted:
        request, row = reading.request, reading.row
        assert reading.last is not None
        if self._state is None:
            self._state = self._programs.empty()
        self._state, outputs = self._programs.admit(
            self._state,
            row,
            reading.cache,
            reading.last,
            request.prompt,
            self._params(request),
        )
        self._rows[row], self._ended[row] = request, False
        return _Admitted(outputs, reading.reports, [(request, row, 0)])

    def _params(self, request: Request) -> SamplingParams:
        settings = request.settings
        return sampling_params(
            settings,
            self._stops(settings),
            self._threshold,
            adapters=self._programs.adapters,
        )

    def _hand_out(self, admitted: list[_Admitted]) -> list[Request]:
        """Waits for first tokens, and hands them out."""
        news = []
        for outputs, reports, places in admitted:
            outputs, reports = jax.device_get((outputs, reports))
            for request, row, at in places:
                for report in reports:
                    # What a text's pieces leave open is what the worst of them does.
                    for name, value in report.items():
                        known = request.aux.get(name, -math.inf)
                        request.aux[name] = max(known, float(value))
                self._take(request, row, outputs, at)
                news.append(request)
        return news

    def _launch(self) -> _Call | None:
        """Starts a call of the decode program, where any slot is active."""
        # Copy the list: a request that ends below frees its row in it.
        rows = list(self._rows)
        if not any(rows):
            return None
        assert self._state is not None
        self._state, outputs, steps = self._programs.decode(
            self._state, self._ended, until_free=bool(self._queue)
        )
        # A new array: the device may not have read the old one yet.
        self._ended = np.zeros(self.slots, bool)
        self.counts.calls += 1
        return _Call(rows, outputs, steps)

    def _collect(self, call: _Call | None) -> list[Request]:
        """Waits for the tokens that a call drew, and passes them to their requests."""
        if call is None:
            return []
        # One copy from the device for all rows, and not one for each.
        outputs, steps = jax.device_get((call.outputs, call.steps))
        self.counts.steps += int(steps)
        news = []
        for row, request in enumerate(call.rows):
            # No token: the request had ended before the call, or its token is still in
            # the loops.
            if request is not None and (outputs.tokens[row] != NO_TOKEN).any():
                self._take(request, row, outputs, row)
                news.append(request)
        return news

    def _take(self, request: Request, row: int, outputs: Outputs, at: int) -> None:
        """Hands a request what was made in place `at`; ends it where it came to it."""
        column = np.asarray(outputs.tokens)[at]
        # The time to the first token.
        if request.started is None:
            request.started = time.monotonic()
        # Steps in which it drew nothing are between, where tokens leave early.
        for n in np.flatnonzero(column != NO_TOKEN).tolist():
            if request.done:  # a stop string, which only the host sees, ended it
                return
            token = int(column[n])
            if token == NOT_FINITE:
                self._free(row)
                self._finish(request, "not_finite")
                return
            request.tokens.append(token)
            self.counts.new_tokens += 1
            if self.config.exit is not None:
                loops = int(np.asarray(outputs.loops)[at, n])
                if request.loops:
                    self.counts.exits[loops] += 1
                request.loops.append(loops)
            if self.config.speculate is not None:
                loops = int(np.asarray(outputs.loops)[at, n])
                self.counts.verified_tokens += loops > 0
                self.counts.accepted_tokens += loops == 1
            if request.settings.logprobs:
                self._tell(request, outputs, at, n)
            self._end_after(request, row, token)

    def _tell(self, request: Request, outputs: Outputs, at: int, n: int) -> None:
        request.logprobs.append(float(np.asarray(outputs.logprobs)[at, n]))
        best = np.asarray(outputs.top)[at, n].tolist()
        values = np.asarray(outputs.top_logprobs)[at, n].tolist()
        request.top.append(list(zip(best, values, strict=True)))

    def _end_after(self, request: Request, row: int, token: int) -> None:
        # Text only where there is a tokenizer; ids are counted either way.
        text, settings = self._texts.get(request), request.settings
        ends = token in self._stops(settings)
        if text is not None:
            # The token that ends a text is not part of it.
            piece = "" if ends else text.push(token)
            request.text += piece
            if self.config.exit is not None:
                request.pieces.append(piece)
        reason = None
        if ends:
            reason = "eos"
        elif text is not None and text.stopped:
            reason = "stop"
        elif len(request.tokens) == settings.max_new_tokens:
            reason = "length"
        if reason is None:
            return
        if reason != "stop" and self.config.keeps_texts:
            # The slot has read all but the newest token and has not changed since.
            tokens = np.array([*request.prompt, *request.tokens[:-1]], np.int32)
            assert self._state is not None
            if not self.prefix_cache.has(tokens, settings.adapter):
                state = self._programs.take(self._state, row)
                self.prefix_cache.put(tokens, state, adapter=settings.adapter)
        self._free(row)
        self._finish(request, reason)

    def _free(self, row: int) -> None:
        self._rows[row] = None
        self._ended[row] = True

    def _finish(self, request: Request, reason: str) -> None:
        text = self._texts.pop(request, None)
        if text is not None:
            # No stop string followed, so the held-back text belongs to the answer.
            rest = text.finish()
            request.text += rest
            if request.pieces:
                request.pieces[-1] += rest
        request.reason, request.ended = reason, time.monotonic()
        self.counts.ended[reason] = self.counts.ended.get(reason, 0) + 1
