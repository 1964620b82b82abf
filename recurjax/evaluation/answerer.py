"""What a model writes after prompts: the engine of evaluations that generate."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from recurjax.data.tokenizers import Tokenizer, text_ends
from recurjax.errors import UserError
from recurjax.evaluation.journal import Journal, key_of
from recurjax.evaluation.scorer import bucket
from recurjax.inference.continuation import Continuation
from recurjax.inference.generate_tokens import generate_tokens
from recurjax.inference.sampling import SamplingConfig, row_keys
from recurjax.model import Decoder

GREEDY = SamplingConfig(temperature=0.0)


class Question(NamedTuple):
    """A prompt, and how far the model goes on after it.

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
      tokenizer: of the model.
      mesh: None: one device.
      rows: read at a time.
      seed: of what is drawn.
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
        # The place is part of what is asked only where it chooses the stream.
        keys = [
            key_of(
                *question[:3],
                dataclasses.astuple(question.sampling),
                text_ends(self.tokenizer),
                *((number, self.seed) if question.sampling.temperature else ()),
            )
            for number, question in enumerate(questions)
        ]
        # The same question twice is asked once; drawn answers have their place in the
        # key.
        left = {key: n for n, key in enumerate(keys) if key not in journal}
        self.report(len(questions) - len(left))
        for batch in self._batches(questions, list(left.values())):
            texts = self._answer([questions[n] for n in batch], batch)
            journal.add((keys[n], text) for n, text in zip(batch, texts, strict=True))
            self.report(len(batch))
        return [journal[key] for key in keys]

    def _check(self, question: Question) -> None:
        if not question.prompt:
            raise UserError("a prompt to go on after needs a token: it is empty")
        # The last new token is not read again.
        needed = len(question.prompt) + question.most - 1
        what = f"{question.most} new tokens after {len(question.prompt)}"
        if (reason := self.model.config.refuses_length(needed, what)) is not None:
            raise UserError(reason)

    def _batches(
        self, questions: Sequence[Question], numbers: list[int]
    ) -> Iterator[list[int]]:
        """Puts alike ones of about one length together, the longest first."""
        alike: dict[tuple[int, SamplingConfig], list[int]] = {}
        for number in numbers:
            question = questions[number]
            # One compiled program serves those with the same number of new tokens.
            alike.setdefault((question.most, question.sampling), []).append(number)
        for group in alike.values():
            group.sort(key=lambda n: len(questions[n].prompt), reverse=True)
            for start in range(0, len(group), self.rows):
                yield group[start : start + self.rows]

    def _answer(self, questions: list[Question], numbers: list[int]) -> list[str]:
        texts, ends = [""] * len(questions), text_ends(self.tokenizer)
        prompts = [np.asarray(question.prompt, np.int32) for question in questions]
        rows = [
            Continuation(self.tokenizer, prompt, question.stop)
            for prompt, question in zip(prompts, questions, strict=True)
        ]

        def on_token(row: int, token: int) -> bool:
            if row >= len(rows):  # fills the batch up, and ends at once
                return True
            # What ends an answer is none of its text.
            if token not in ends:
                texts[row] += rows[row].push(token)
            return rows[row].stopped

        # Batches of one shape: the last one is filled up with prompts of a token.
        fill = self.rows - len(prompts)
        most, longest = questions[0].most, self.model.config.max_length
        needed = max(map(len, prompts)) + most - 1
        generate_tokens(
            self.model,
            # Rows that fill the batch up cost a token: their first callback ends them.
            [*prompts, *[prompts[0][:1]] * fill],
            max_new_tokens=most,
            sampling=questions[0].sampling,
            eos=ends,
            # A row's stream goes by its place among all questions, not in its batch.
            seed=row_keys(self.seed, max(numbers) + 1)[
                np.array([*numbers, *[0] * fill])
            ],
            on_token=on_token,
            cache_length=bucket(needed, longest),
            mesh=self.mesh,
        )
        return [text + row.finish() for text, row in zip(texts, rows, strict=True)]
