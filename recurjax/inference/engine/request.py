"""Requests as their owners see them, and what an engine has done in all."""

import time
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from recurjax.inference.engine.config import RequestSettings


class Request:
    """What became of a request; the engine writes in it, its owner reads.

    Attributes:
      prompt, settings: as submitted.
      tokens: new ones so far, the stop token that ended it included.
      text: what they say, for an engine with a tokenizer; up to a stop string, and
        without what may still become one.
      loops: that made each token, on an engine whose tokens leave early.
      pieces: of `text` that each token added, on such an engine with a tokenizer; what
        was held back to the end is the last one's.
      logprobs: of each token, where the settings ask for it.
      top: for each token, the likeliest in its place and their logprobs.
      reason: "eos" (or another stop token), "stop" (a string), "length", "cancelled",
        "not_finite"; None while it goes on.
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
    """What an engine has done since it started.

    Attributes:
      read_tokens, reused_tokens: of prompts, by the model and from kept states.
      new_tokens: drawn and handed out.
      calls, steps: of the decode program, and what it ran in them.
      ended: requests by what ended them.
      exits: tokens by the loops that made them, where they leave early; the first of a
        request is not among them, for it is drawn from its prompt.
    """

    submitted: int = 0
    read_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    calls: int = 0
    steps: int = 0
    ended: dict[str, int]
    exits: dict[int, int]
