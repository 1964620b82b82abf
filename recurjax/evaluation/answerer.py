"""Continuations of prompts, for evaluations that generate."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import Mesh

from recurjax.data.tokenizers import Tokenizer, text_ends
from recurjax.errors import UserError
from recurjax.evaluation.journal import Journal, key_of
from recurjax.evaluation.scorer import bucket
from recurjax.inference.engine import RequestSettings
from recurjax.inference.generate import continue_requests
from recurjax.inference.sampling import SamplingConfig
from recurjax.model import Decoder

GREEDY = SamplingConfig(temperature=0.0)


class Question(NamedTuple):
    """A prompt, and how far the model continues after it.

    Attributes:
      prompt: token ids, at least one.
      most: new tokens at the most; a token of `text_ends` ends an answer too.
      stop: an answer ends before the first of these strings.
      sampling: how tokens are chosen; drawn ones come from a stream that belongs to
        the question's place in the call.
    """

    prompt: tuple[int, ...]
    most: int
    stop: tuple[str, ...] = ()
    sampling: SamplingConfig = GREEDY


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """Answers questions with a model, several at a time.

    Attributes:
      model: any variant, laid out on `mesh`, its weights as they are multiplied (see
        `in_compute_dtype`).
      tokenizer: tokenizer of the model.
      mesh: None: one device.
      rows: read at a time.
      seed: seed of the sampling.
      report: called with the number of questions done since the last call.
    """

    model: Decoder
    tokenizer: Tokenizer
    mesh: Mesh | None = None
    rows: int = 16
    seed: int = 0
    report: Callable[[int], None] = lambda done: None

    def __call__(
        self, questions: Sequence[Question], journal: Journal | None = None
    ) -> list[str]:
        """Returns the answers' texts, without what stopped them.

        Args:
          journal: has answers of an earlier call, and gets the new ones; None: none.

        Raises:
          UserError: a prompt is empty, or its answer does not fit the model.
        """
        journal = Journal(None) if journal is None else journal
        # Refused before anything is generated: one prompt of thousands may be too long.
        for question in questions:
            self._check(question)
        # The position is part of the key only where it selects the random stream.
        keys = [
            key_of(
                *question[:3],
                dataclasses.astuple(question.sampling),
                text_ends(self.tokenizer),
                *((number, self.seed) if question.sampling.temperature else ()),
            )
            for number, question in enumerate(questions)
        ]
        # Equal prompts run once; sampled answers have their position in the key.
        unanswered = {key: n for n, key in enumerate(keys) if key not in journal}
        self.report(len(questions) - len(unanswered))
        for number, text in self._answers(questions, list(unanswered.values())):
            journal.add([(keys[number], text)])
            self.report(1)
        return [journal[key] for key in keys]

    def _check(self, question: Question) -> None:
        if not question.prompt:
            raise UserError(
                "a prompt to continue must have at least one token, got none"
            )
        # The last new token is not read again.
        needed = len(question.prompt) + question.most - 1
        what = f"{question.most} new tokens after {len(question.prompt)}"
        if (reason := self.model.config.refuses_length(needed, what)) is not None:
            raise UserError(reason)

    def _answers(
        self, questions: Sequence[Question], numbers: list[int]
    ) -> Iterator[tuple[int, str]]:
        """Yields questions' numbers and answers, those with the longest texts first."""
        # A slot is as long as its engine's longest text: alike ones go together.
        lengths = {number: self._length(questions[number]) for number in numbers}
        for length in sorted(set(lengths.values()), reverse=True):
            alike = [number for number in numbers if lengths[number] == length]
            finished = continue_requests(
                self.model,
                [self._request(questions[number], number) for number in alike],
                tokenizer=self.tokenizer,
                slots=self.rows,
                cache_length=length,
                mesh=self.mesh,
            )
            for place, request in finished:
                yield alike[place], request.text

    def _length(self, question: Question) -> int:
        needed = len(question.prompt) + question.most - 1
        return bucket(needed, self.model.config.max_length)

    def _request(
        self, question: Question, number: int
    ) -> tuple[tuple[int, ...], RequestSettings]:
        return question.prompt, RequestSettings(
            max_new_tokens=question.most,
            sampling=question.sampling,
            seed=self.seed,
            # By its place among all questions, whatever is answered already.
            stream=number,
            stop=question.stop,
            stop_tokens=text_ends(self.tokenizer),
        )
