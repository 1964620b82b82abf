"""Runs a model for evaluations: on a mesh, with a journal and a progress bar.

An evaluation makes requests, pairs to score or prompts to continue, and aggregates the
results. This module and the ones it calls batch requests, shard them over devices and
save the answers, so that a killed evaluation continues.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jax.sharding import Mesh

from recurjax.data.tokenizers import Tokenizer, encode_continued, first_token
from recurjax.errors import UserError
from recurjax.evaluation.answerer import Answerer, Question
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.progress import progress_bar
from recurjax.evaluation.scorer import Pair, PairScore, Scorer
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.model import Decoder

APART = "continuations encoded alone: a token would reach over the join"


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """A model under evaluation; all processes of a mesh call it with the same input.

    Attributes:
      model: any variant, laid out on `mesh`.
      tokenizer: tokenizer of the model.
      step: training step of its checkpoint.
      mesh: None: one device.
      rows: read at a time.
      window: tokens that are read at once where a text is longer than that.
      bos: put the tokenizer's BOS, if it has one, before each context.
      seed: seed of the sampling.
      journal: keeps answers until the evaluation is over.
      notes: how many items were read in an unusual way, such as `APART`.
      left_out: what was not scored, and why; the other items were.
    """

    model: Decoder
    tokenizer: Tokenizer
    step: int = 0
    mesh: Mesh | None = None
    rows: int = 16
    window: int = 2048
    bos: bool = True
    seed: int = 0
    journal: Journal = field(default_factory=lambda: Journal(None))
    notes: Counter[str] = field(default_factory=Counter)
    left_out: list[str] = field(default_factory=list)

    def scores(self, pairs: Sequence[Pair], *, name: str) -> list[PairScore]:
        """Scores pairs in their order.

        Args:
          name: what the progress bar says.
        """
        # One bar for each kind of request; its total is known beforehand.
        with progress_bar(name, len(pairs)) as done:
            return replace(self._scorer, report=done)(pairs, self.journal)

    def answers(self, questions: Sequence[Question], *, name: str) -> list[str]:
        """Continues prompts and returns the texts in their order."""
        with progress_bar(name, len(questions)) as done:
            return replace(self._answerer, report=done)(questions, self.journal)

    def context(self, text: str) -> tuple[int, ...]:
        """Encodes what a continuation or an answer follows, never to nothing.

        Raises:
          UserError: the text is empty and the tokenizer has neither BOS nor EOS.
        """
        ids = tuple(self.tokenizer.encode(text).tolist())
        begin = () if self.tokenizer.bos is None else (self.tokenizer.bos,)
        # An empty context still needs a token for the first state.
        ids = begin + ids if self.bos else ids
        return ids or (self.first,)

    def pair(self, context: str, continuation: str) -> Pair:
        """Encodes a context and what continues it as they are written together.

        Spaces at a context's end belong to the continuation, because most tokenizers
        join them to the next word. Where a token would reach over the join, the
        continuation has its own tokens: see `encode_continued`.

        Raises:
          UserError: the continuation has no token.
        """
        bare = context.rstrip()
        rest = context[len(bare) :] + continuation
        return self.continued([bare] if bare else [], rest)

    def continued(
        self, parts: Sequence[str | int], text: str, *, bos: bool | None = None
    ) -> Pair:
        """Encodes a context in parts, of which integers are tokens, and what follows.

        Args:
          bos: put the tokenizer's BOS before the context; None: as the evaluator does.

        Raises:
          UserError: the continuation has no token.
        """
        [pair] = encode_continued(self.tokenizer, [(parts, text)])
        if not len(pair.after):
            raise UserError(
                f"the continuation {text!r} adds no token to its context: remove "
                "this item"
            )
        begin = self.tokenizer.bos if (self.bos if bos is None else bos) else None
        before = [*([] if begin is None else [begin]), *pair.before.tolist()]
        # An empty context still needs a token for the first state.
        context = tuple(before) or (self.first,)
        self.notes[APART] += pair.apart
        return Pair(context, tuple(pair.after.tolist()))

    def summary(self) -> dict[str, Any]:
        """Returns what a report says next to the figures; empty: nothing."""
        notes = {name: count for name, count in self.notes.items() if count}
        return ({"notes": notes} if notes else {}) | (
            {"left_out": self.left_out} if self.left_out else {}
        )

    def cropped(self, pair: Pair) -> Pair:
        """Drops the first tokens of a context that does not fit the model.

        Raises:
          UserError: the continuation alone does not fit.
        """
        config, length = self.model.config, len(pair.continuation)
        what = f"a continuation of {length} tokens"
        reason = config.refuses_length(length, what, fix="remove this item")
        if reason is not None:
            raise UserError(reason)
        # The continuation's last token is scored and not read; without a limit none is.
        needed = len(pair.context) + length - 1
        excess = needed - (config.max_length or needed)
        if excess <= 0:
            return pair
        return pair._replace(context=pair.context[excess:])

    @property
    def first(self) -> int:
        """The token before a text's first one; see `first_token`.

        Raises:
          UserError: the tokenizer has neither.
        """
        first = first_token(self.tokenizer)
        if first is None:
            raise UserError(
                "scoring a text without a context starts from BOS or EOS, and the "
                "tokenizer has neither: use tasks whose items have contexts"
            )
        return first

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(model=self.model, mesh=self.mesh, rows=self.rows)

    @cached_property
    def _answerer(self) -> Answerer:
        return Answerer(
            # Cast once for all questions: generation is bound by reading the weights.
            model=in_compute_dtype(self.model),
            tokenizer=self.tokenizer,
            mesh=self.mesh,
            rows=self.rows,
            seed=self.seed,
        )
