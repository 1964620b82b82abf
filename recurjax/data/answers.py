"""Rows of fine-tuning examples, with the loss on answers or assistant turns.

An example is BOS (where the tokenizer has one), the prompt, the answer and EOS. A
templated example begins as the template begins it, as it does when the model is served.
An example of n tokens fills n - 1 positions: each position reads a token, and its
target is the next token where that belongs to the answer, or to the prompt if that is
learned too. The source is RAT's fine-tuning, which has no BOS. In a conversation the
answer is everything from the assistant's first word on, but only the assistant's own
words are targets.
"""

import bisect
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from recurjax.data.batches import Batch, Layout
from recurjax.data.chat import ChatTemplate, Turn, compiled, plain
from recurjax.data.config import Conversations, DataConfig, Examples, PromptAnswer
from recurjax.data.corpora import Messages, read_conversations, read_messages
from recurjax.data.loader import RowLoader, RowsOfText
from recurjax.data.packing import without_middle
from recurjax.data.tokenizers import Tokenizer, encode_continued
from recurjax.errors import UserError
from recurjax.types import IGNORED

Ids = Int32[np.ndarray, " _"]


class Example(NamedTuple):
    """Tokens of a prompt, BOS included, and of its answer, EOS included.

    Attributes:
      scored: which of the answer's tokens are learned; None: all.
      learned: which of the prompt's tokens are learned; None: none.
    """

    prompt: Ids
    answer: Ids
    scored: Bool[np.ndarray, " _"] | None = None
    learned: Bool[np.ndarray, " _"] | None = None


def fitted(example: Example, length: int) -> Example:
    """Cuts an example to a row of `length` places.

    The prompt loses its middle, as in RAT: its first tokens fill half of the row, and
    its last ones precede the answer. An answer that is longer than the row loses its
    end, with EOS.
    """
    tokens, most = length + 1, length
    if example.scored is not None:
        # A conversation is cut at its end, unless its first answer would be lost.
        most = max(tokens - len(example.prompt), tokens // 2)
    answer = example.answer[:most]
    room, first = tokens - len(answer), tokens // 2
    prompt = without_middle(example.prompt, room, first=first)
    scored = None if example.scored is None else example.scored[:most]
    learned = example.learned
    if learned is not None and len(learned) > room:
        learned = without_middle(learned, room, first=first)
        # What precedes this token now is not what came before it.
        learned[first:][:1] = False
    return Example(prompt, answer, scored, learned)


@dataclass(frozen=True, kw_only=True)
class AnswersDataset(RowsOfText):
    """Examples in memory; the counterpart of `recurjax.data.dataset.Dataset`.

    Attributes:
      config: what it was opened with; its corpus is one of `Examples`.
      tokenizer: made the tokens.
      examples: all of them, in the files' order.
      cut: those from this number on are the validation.
    """

    config: DataConfig
    tokenizer: Tokenizer
    examples: tuple[Example, ...]
    cut: int

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer and of all that the rows depend on."""
        digest = hashlib.sha256(self.tokenizer.hash.encode())
        digest.update(json.dumps([self.cut, self._packed]).encode())
        for example in self.examples:
            # Hash the sizes too: otherwise moving a token from a prompt to its answer
            # would not change the fingerprint.
            sizes = np.array([len(example.prompt), len(example.answer)], "<i4")
            parts = [sizes, example.prompt, example.answer]
            masks = (example.scored, example.learned)
            parts += [mask for mask in masks if mask is not None]
            for part in parts:
                digest.update(part.astype("<i4").tobytes())
        return digest.hexdigest()

    def split(self, name: Literal["train", "validation"]) -> tuple[Example, ...]:
        """Returns the examples of a split."""
        return (
            self.examples[: self.cut] if name == "train" else self.examples[self.cut :]
        )

    def loader(
        self,
        split: Literal["train", "validation"],
        *,
        length: int,
        batch: int,
        rows: tuple[int, int] | None = None,
        seed: int | None = None,
        in_order: bool | None = None,
    ) -> RowLoader:
        """Returns batches of `batch` rows of `length` places.

        Those for training are endless: every row once an epoch, in another order each.
        Which examples share a packed row stays as it is. Those in order are one pass,
        whose last batch is padded with rows without targets.

        Args and errors are those of `Dataset.loader`.
        """
        if split not in ("train", "validation"):
            raise ValueError(
                f"AnswersDataset: split must be train or validation, got {split!r}"
            )
        if length < 1 or batch < 1:
            raise ValueError(
                "AnswersDataset: length and batch must be at least 1, got "
                f"{length} and {batch}"
            )
        questions = self.split(split)
        if not questions:
            raise UserError(
                f"the {split} split holds none of the {len(self.examples)} "
                "examples: add examples or change validation_fraction"
            )
        examples = [fitted(example, length) for example in questions]
        plan = [[number] for number in range(len(examples))]
        if self._packed:
            plan = packed(examples, length)
        return RowLoader(
            fill=partial(_fill, examples, plan),
            count=len(plan),
            layout=Layout(
                length=length,
                batch=batch,
                rows=rows or (0, batch),
                segments=self._packed,
            ),
            in_order=split == "validation" if in_order is None else in_order,
            seed=self.config.seed if seed is None else seed,
            fingerprint=self.fingerprint,
            split=split,
            prefetch=self.config.prefetch,
            threads=self.config.threads,
        )

    @property
    def _packed(self) -> bool:
        # Segment ids separate the examples that share a row.
        return self.config.has_segments


def _fill(
    examples: Sequence[Example],
    plan: Sequence[Sequence[int]],
    batch: Batch,
    r: int,
    number: int,
) -> None:
    """Writes the examples that share a row by the plan, each cut to the row already."""
    at = 0
    for segment, member in enumerate(plan[number]):
        prompt, answer, scored, learned = examples[member]
        # The last token is only a target, so it takes no input position.
        places = slice(at, at + len(prompt) + len(answer) - 1)
        batch["ids"][r, places] = np.concatenate([prompt, answer[:-1]])
        # From the prompt's last position on, each position predicts the next token.
        targets = answer if scored is None else np.where(scored, answer, IGNORED)
        batch["targets"][r, places.stop - len(answer) : places.stop] = targets
        if learned is not None:
            targets = np.where(learned, prompt, IGNORED)[1:]
            batch["targets"][r, at : at + len(targets)] = targets
        if "segments" in batch:
            batch["segments"][r, places] = segment
        at = places.stop


def packed(examples: Sequence[Example], length: int) -> list[list[int]]:
    """Plans rows of at most `length` places: best fit, the longest examples first.

    Examples keep their order within a row, and rows that of their first examples.
    """
    sizes = [len(example.prompt) + len(example.answer) - 1 for example in examples]
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # free places of each open row, ascending
    # Break ties by number, so that every process makes the same plan.
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        # Best fit: the open row with the least room that is still enough.
        at = bisect.bisect_left(spaces, (sizes[number], 0))
        if at == len(spaces):
            free, row = length, len(rows)
            rows.append([])
        else:
            free, row = spaces.pop(at)
        rows[row].append(number)
        bisect.insort(spaces, (free - sizes[number], row))
    return sorted(sorted(row) for row in rows)


def open_answers(config: DataConfig, tokenizer: Tokenizer) -> AnswersDataset:
    """Reads and tokenizes examples.

    Raises:
      UserError: the files are not what the corpus says, or nothing ends an answer.
    """
    corpus = config.corpus
    assert isinstance(corpus, Examples)
    if isinstance(corpus, Conversations):
        examples = _talks(corpus, tokenizer)
    else:
        examples = _pairs(corpus, tokenizer)
    if not examples:
        raise UserError(
            f"{', '.join(corpus.patterns)} holds no examples: name files with "
            "at least one"
        )
    # A fraction above 0 keeps at least one example for validation.
    held_out = round(config.held_out * len(examples))
    held_out = max(held_out, int(config.held_out > 0))
    return AnswersDataset(
        config=config,
        tokenizer=tokenizer,
        examples=examples,
        cut=len(examples) - held_out,
    )


def _talks(corpus: Conversations, tokenizer: Tokenizer) -> tuple[Example, ...]:
    """Reads conversations; each begins as its template begins it."""
    source = _template(corpus)
    if source is None:
        source = tokenizer.settings.template
    if source is None:
        raise UserError(
            "Conversations: the tokenizer has no chat template: set the "
            "corpus' template"
        )
    template, talks = compiled(source, tokenizer), []
    for messages, where in read_conversations(corpus):
        try:
            turns = template.turns(messages, tokenizer)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        if not turns[0].parts:
            raise UserError(
                f"{where}: the chat template writes nothing before the answer, "
                "which needs a prompt: use another template"
            )
        talks.append(turns)
    # All conversations at once: the tokenizer takes them on all cores.
    texts = [[part for turn in turns for part in turn.parts] for turns in talks]
    encoded = tokenizer.encode_parts(texts, guarded=template.guarded(tokenizer))
    return tuple(map(_talk, talks, encoded))


def _talk(turns: Sequence[Turn], ids: Sequence[Ids]) -> Example:
    scored, parts = [], iter(ids)
    for turn in turns:
        # A turn ends with its last special token; line breaks after it are read, for
        # the model never samples them: generation has stopped by then.
        ends = [n for n, part in enumerate(turn.parts) if isinstance(part, int)]
        last = ends[-1] if ends else len(turn.parts)
        for n in range(len(turn.parts)):
            scored.append(np.full(len(next(parts)), turn.says and n <= last))
    first = sum(map(len, ids[: len(turns[0].parts)]))
    tokens, learned = np.concatenate(ids), np.concatenate(scored)
    return Example(tokens[:first], tokens[first:], learned[first:])


def _pairs(corpus: PromptAnswer, tokenizer: Tokenizer) -> tuple[Example, ...]:
    """Reads prompts with answers."""
    if tokenizer.eos is None:
        raise UserError(
            "an answer ends with EOS and the tokenizer has none: name it, as "
            "in TokenizerFile(path=..., eos=...)"
        )
    source = _template(corpus)
    template = None if source is None else compiled(source, tokenizer)
    lines = list(read_messages(corpus))
    prompts, begins = [], []
    for number, line in enumerate(lines):
        begin, parts = _prompt(line, template, tokenizer)
        if not parts:
            raise UserError(
                f"example {number + 1} of {', '.join(corpus.patterns)}: the chat "
                "template writes nothing before the answer, which needs a prompt: "
                "use another template"
            )
        prompts.append(parts)
        begins.append(np.array(begin, np.int32))
    guarded = {} if template is None else template.guarded(tokenizer)
    texts = [(p, line.answer) for p, line in zip(prompts, lines, strict=True)]
    end = np.array([tokenizer.eos], np.int32)
    examples = []
    for begin, (before, after, _) in zip(
        begins, encode_continued(tokenizer, texts, guarded=guarded), strict=True
    ):
        prompt, answer = np.concatenate([begin, before]), np.concatenate([after, end])
        learned = None
        if corpus.loss == "all":
            learned = np.arange(len(prompt)) > 0  # nothing predicts the first token
        examples.append(Example(prompt, answer, learned=learned))
    for number, example in enumerate(examples):
        if not len(example.prompt):
            raise UserError(
                f"example {number + 1} of {', '.join(corpus.patterns)} has an "
                "empty prompt, and the tokenizer has no BOS to start from: remove "
                "that example"
            )
    return tuple(examples)


def _prompt(
    line: Messages, template: ChatTemplate | None, tokenizer: Tokenizer
) -> tuple[list[int], list[str | int]]:
    """Returns BOS, if it is read first, and the texts and tokens before the answer."""
    if line.prompt[0][0] and template is not None:
        # Only the template may write a BOS: serving adds none before a conversation
        # either.
        messages = [{"role": role, "content": text} for role, text in line.prompt]
        return [], template.parts(messages, tokenizer)
    text = plain(line.prompt) if line.prompt[0][0] else line.prompt[0][1]
    # Encode the text apart from the tokens, as for a prompt: after a special token some
    # tokenizers drop the space that a text begins with.
    return [] if tokenizer.bos is None else [tokenizer.bos], [text]


def _template(corpus: Examples) -> str | None:
    if corpus.template is None:
        return None
    try:
        return Path(corpus.template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        kind = type(corpus).__name__
        raise UserError(f"{kind}: cannot read the chat template: {error}") from error
