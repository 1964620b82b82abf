"""The configs of an engine and of a request, and the request's result."""

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int32

from recurjax.errors import UserError
from recurjax.exits import ExitRule
from recurjax.inference.sampling import PLAIN, SamplingConfig
from recurjax.ranges import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Seed,
    check_ranges,
)
from recurjax.types import Missing

MOST_STOPS = 8
"""Tokens that may end one request, the tokenizer's EOS among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes of an engine; its programs are compiled for them.

    Attributes:
      slots: requests that are continued at once; "auto": as many as memory holds.
      length: tokens that a slot holds, prompt and answer together.
      prefill_tokens: prompt tokens read at most between two calls of the decode
        program, so that a long prompt does not delay other requests' next tokens.
      steps: steps in one call of the decode program: a token a slot in each, or up to
        `speculate`.
      states_gib: memory for the states of texts that were read already; 0: none.
      prefill: "exact", or a way of the variant's own such as "sweeps:4", in each piece
        of `prefill_tokens` for itself.
      top_logprobs: how many of the likeliest tokens a request may return at each
        position.
      exit: when tokens leave a recursive model early; a step is then one pass of its
        block over slots at mixed loops. None: they do not.
      missing: with `exit`, how the keys and values of skipped loops are filled; or
        "verify": tokens run all loops while their successor starts from the exit's
        guess, so that greedy texts equal the full model's. None: share where the model
        does, else propagate.
      speculate: tokens that a step of a recursive model draws at most: its first loop
        drafts them one after another, and a pass of the other loops verifies all. Texts
        are distributed as without it. None: a step draws one token.
    """

    slots: PositiveInt | Literal["auto"] = 8
    length: PositiveInt = 4096
    prefill_tokens: PositiveInt = 512
    steps: PositiveInt = 8
    states_gib: NonNegativeFloat = 0.0
    prefill: str = "exact"
    top_logprobs: NonNegativeInt = 0
    exit: ExitRule | None = None
    missing: Missing | Literal["verify"] | None = None
    speculate: PositiveInt | None = None

    def __post_init__(self):
        check_ranges(self)
        # Sweeps only approximate the exact state: a text that continues from one would
        # differ from the same text alone.
        if self.states_gib and self.prefill != "exact":
            raise UserError(
                "states can be kept with prefill exact only, got prefill "
                f"{self.prefill}: set prefill to exact or states_gib to 0"
            )

        if self.missing is not None and self.exit is None:
            raise UserError(
                f"missing {self.missing} applies to early exits only: set exit "
                "too, or leave missing out"
            )
        if self.speculate is not None and self.exit is not None:
            raise UserError(
                f"speculate {self.speculate} runs all loops for every token, and with "
                "exit tokens leave early: leave one of them out"
            )

    @property
    def keeps_texts(self) -> bool:
        """Whether the states of finished texts are kept."""
        # Only without these two a slot's state is one that reading the text makes.
        sequence_wise = self.exit is None and self.speculate is None
        return self.states_gib > 0 and sequence_wise

    @property
    def widths(self) -> tuple[int, ...]:
        """Lengths of pieces that the prefill is compiled for, each twice the last."""
        # Few widths, so that few programs are compiled; a short prompt is not padded to
        # the largest.
        widths, width = [], min(_SMALLEST_PIECE, self.prefill_tokens)
        while width < self.prefill_tokens:
            widths.append(width)
            width *= 2
        return (*widths, self.prefill_tokens)


_SMALLEST_PIECE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSettings:
    """The settings of one request, none of which triggers a compilation.

    Attributes:
      max_new_tokens: after which it ends, if nothing ended it before.
      sampling: how its tokens are chosen.
      seed, stream: its tokens are drawn from `row_keys(seed, stream + 1)[stream]`,
        whatever else runs.
      stop_tokens: end it, as the engine's EOS does, and are not part of its text.
      ignore_eos: the EOS does not end it.
      stop: strings before which its text ends; for an engine with a tokenizer.
      keep: lengths of the prompt's beginnings that others may share, such as a system
        prompt: their states are kept.
      logprobs: tell each token's logarithmic probability, before temperature and
        filters, and the `top_logprobs` likeliest tokens in its place.
      threshold: threshold of the engine's exit rule; None: the rule's default. 1: no
        token exits early.
      adapter: the number of its adapter, of a model that has several; 0: none.
    """

    max_new_tokens: PositiveInt = 200
    sampling: SamplingConfig = PLAIN
    seed: Seed = 0
    stream: NonNegativeInt = 0
    stop_tokens: tuple[NonNegativeInt, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    keep: tuple[NonNegativeInt, ...] = ()
    logprobs: bool = False
    threshold: Fraction | None = None
    adapter: NonNegativeInt = 0

    def __post_init__(self):
        check_ranges(self)
        if isinstance(self.stop, str) or not all(self.stop):
            raise UserError(
                f"stop must be a list of non-empty strings, got {self.stop!r}"
            )


class Request:
    """A request and its results, which the engine writes and the owner reads.

    Attributes:
      prompt, settings: as submitted.
      tokens: new ones so far, the stop token that ended it included.
      text: what they say, for an engine with a tokenizer; up to a stop string, and
        without what may still become one.
      loops: loops that made each token, on an engine whose tokens leave early.
      pieces: the piece of `text` that each token added, on such an engine with a
        tokenizer; text held back to the end belongs to the last token.
      logprobs: log-probability of each token, if the settings request it.
      top: for each token, the likeliest in its place and their logprobs.
      reason: "eos" (or another stop token), "stop" (a string), "length", "cancelled",
        "not_finite"; None while it continues.
      aux: what the reading of its prompt had to report, see `Decoder.prefill`.
      reused: tokens of the prompt that a kept state saved from being read.
      submitted, started, ended: seconds of `time.monotonic`; of the first token, and of
        the end, None before.
    """

    def __init__(self, prompt: Int32[np.ndarray, " T"], settings: RequestSettings):
        self.prompt, self.settings = prompt, settings
        self.tokens: list[int] = []
        self.text = ""
        self.loops: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[float] = []
        self.top: list[list[tuple[int, float]]] = []
        self.reason: str | None = None
        self.aux: dict[str, float] = {}
        self.reused = 0
        self.submitted = time.monotonic()
        self.started: float | None = None
        self.ended: float | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""
        return self.reason is not None


@dataclass(kw_only=True, slots=True)
class Counts:
    """An engine's counters since it started.

    Attributes:
      read_tokens, reused_tokens: prompt tokens that the model read, and those taken
        from cached states.
      new_tokens: drawn and handed out.
      calls, steps: calls of the decode program, and steps that they ran.
      ended: requests by what ended them.
      exits: tokens by the loops that made them, where they leave early; the first of a
        request is not among them, for it is drawn from its prompt.
      verified_tokens, accepted_tokens: drafts that the full model verified, with
        `speculate`, and those among them that it accepted.
    """

    submitted: int = 0
    read_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    calls: int = 0
    steps: int = 0
    ended: dict[str, int]
    exits: dict[int, int]
    verified_tokens: int = 0
    accepted_tokens: int = 0
