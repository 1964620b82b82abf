"""RULER's eight needles in haystacks, at any length and for any tokenizer, offline.

Source: Hsieh et al. 2024 and its public `scripts/synthetic.yaml`, whose templates,
sizes and depths these are. An item is a function of (task, tokens, seed, split,
number); the public generator draws all items of a task from one stream.

lm-evaluation-harness has these tasks too. Its generator downloads essays and a model of
sentences, and needs a tokenizer of transformers. Here the haystack is a text that the
caller names, a sentence ends where a regular expression says, and any tokenizer serves.
"""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from recurjax.data.corpora import embedded_text
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    "There and back again."
)
TEMPLATE = (
    "Some special magic {kind} are hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the {kind} afterwards.\n{context}\nWhat are "
    "all the special magic {kind} for {query} mentioned in the provided text? The "
    "special magic {kind} for {query} mentioned in the provided text are"
)

DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int)
"""Places of needles in a text, in percent of its sentences."""

ANSWER_TOKENS = 128
SPLITS = ("train", "validation")
Kind = Literal["words", "numbers", "uuids"]


class NeedleSetting(NamedTuple):
    """The needles of a task, their haystack, and how many a prompt asks for.

    Attributes:
      haystack: "text", "noise" (one line again and again) or "needle" (others of them).
      key, value: what a needle's two halves are.
      keys, values, queries: needles' keys, values of each key, keys in the question.
    """

    haystack: Literal["text", "noise", "needle"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLES = {
    "niah_single_1": NeedleSetting("noise"),
    "niah_single_2": NeedleSetting("text"),
    "niah_single_3": NeedleSetting("text", value="uuids"),
    "niah_multikey_1": NeedleSetting("text", keys=4),
    "niah_multikey_2": NeedleSetting("needle"),
    "niah_multikey_3": NeedleSetting("needle", key="uuids", value="uuids"),
    "niah_multivalue": NeedleSetting("text", values=4),
    "niah_multiquery": NeedleSetting("text", keys=4, queries=4),
}
"""The eight of RAT's table 12."""


class Haystack(NamedTuple):
    """A text that hides needles.

    Attributes:
      name: name of the text; results on different texts do not compare.
      seed: seed of the items.
    """

    text: str
    name: str
    seed: int = 42


def read_haystack(paths: Sequence[Path], *, seed: int) -> Haystack:
    """Returns the text of files; without any, the text in the package.

    Raises:
      UserError: a file cannot be read.
    """
    if not paths:
        return Haystack(embedded_text(), "embedded text", seed)
    try:
        texts = [path.read_text(encoding="utf-8") for path in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--haystack: cannot read a file: {error}") from error
    return Haystack("\n".join(texts), ", ".join(path.name for path in paths), seed)


class NeedleItem(NamedTuple):
    """A prompt, up to where the answer begins, and the strings it should have."""

    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NeedleTask:
    """Writes a task's items of at most `tokens` tokens, prompt and answer together.

    Attributes:
      task: one of `NEEDLES`.
      tokens: the most that a prompt and its answer have, by `tokenizer`, with BOS.
      tokenizer: tokenizer of the model.
      text: the haystack where one is a text.
      seed: seed of everything that is drawn.
    """

    task: str
    tokens: int
    tokenizer: Tokenizer
    text: str
    seed: int = 42

    def item(self, number: int, *, split: str = "validation") -> NeedleItem:
        """Returns item `number` with the largest haystack that fits, or a little less.

        Raises:
          UserError: not even the smallest haystack fits.
        """
        # The size of item 0 serves all items: bisection for each of them would encode
        # every haystack a dozen times.
        size = self.size
        while size >= self._smallest:
            item = self._draw(size, number, split)
            if self._length(item.prompt) <= self.tokens:
                return item
            # This item's words have more tokens than those of item 0.
            size -= max(1, size // 50)
        raise self._too_short()

    @cached_property
    def size(self) -> int:
        """The largest haystack with which a first item fits, by bisection.

        Raises:
          UserError: not even the smallest one fits.
        """

        def fits(size: int) -> bool:
            return self._length(self._draw(size, 0, "validation").prompt) <= self.tokens

        low = self._smallest
        if not fits(low):
            raise self._too_short()
        # Doubled until one does not fit, then halved between the two.
        high = 2 * low
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _length(self, prompt: str) -> int:
        bos = self.tokenizer.bos is not None
        return len(self.tokenizer.encode(prompt)) + bos + ANSWER_TOKENS

    def _too_short(self) -> UserError:
        least = self._length(self._draw(self._smallest, 0, "validation").prompt)
        return UserError(
            f"{self.task} needs at least {least} tokens by this tokenizer, got "
            f"{self.tokens}: raise --length"
        )

    @property
    def _smallest(self) -> int:
        form = NEEDLES[self.task]
        # A text of at least twenty words; otherwise a line for each needle.
        return 20 if form.haystack == "text" else form.keys * form.values

    def _draw(self, size: int, number: int, split: str) -> NeedleItem:
        # Item, task and split are the key: an item does not depend on those before it.
        key = [self.seed, list(NEEDLES).index(self.task), SPLITS.index(split), number]
        rng = np.random.default_rng(key)
        form = NEEDLES[self.task]
        keys = [_drawn(form.key, rng) for _ in range(form.keys)]
        values = [[_drawn(form.value, rng) for _ in range(form.values)] for _ in keys]
        needles = [
            NEEDLE.format(kind=form.value, key=key, value=value)
            for key, of_key in zip(keys, values, strict=True)
            for value in of_key
        ]
        needles = [needles[at] for at in rng.permutation(len(needles))]
        if form.haystack == "text":
            context = self._in_text(needles, size, rng)
        else:
            context = _in_lines(form, needles, size, rng)
        queried = rng.choice(form.keys, form.queries, replace=False)
        queries = [keys[at] for at in queried]
        query = queries[0]
        if len(queries) > 1:
            query = ", ".join(queries[:-1]) + ", and " + queries[-1]
        template, kind = TEMPLATE, str(form.value)
        if form.queries * form.values == 1:  # a question for one answer is singular
            for plural, singular in (
                ("Some", "A"),
                ("are all", "is"),
                # As the public templates do it, word by word.
                ("are", "is"),
            ):
                template = template.replace(plural, singular)
            kind = kind[:-1]
        prompt = template.format(kind=kind, context=context, query=query)
        return NeedleItem(
            prompt, tuple(value for at in queried for value in values[at])
        )

    def _in_text(self, needles: list[str], size: int, rng: np.random.Generator) -> str:
        # Repeats the text if it is shorter than the haystack.
        words = self._words
        text = " ".join((words * -(-size // len(words)))[:size])
        # The public generator asks a trained model where a sentence ends; this rule
        # gives the same sentences on every machine.
        sentences = re.split(r"(?<=[.!?])\s+", text)
        depths = rng.choice(DEPTHS, len(needles), replace=False)
        places = sorted(len(sentences) * int(depth) // 100 for depth in depths)
        parts, begin = [], 0
        for place, needle in zip(places, needles, strict=True):
            parts += [*sentences[begin:place], needle]
            begin = place
        return " ".join([*parts, *sentences[begin:]])

    @cached_property
    def _words(self) -> list[str]:
        words = self.text.split()
        if not words:
            raise UserError("the haystack has no words: name a file with --haystack")
        return words


def string_match(answer: str, needles: Sequence[str]) -> float:
    """Returns the share of wanted strings that an answer contains, case aside.

    Source: Hsieh et al. 2024, RULER's `string_match_all`, of one item and from 0 to 1.
    """
    text = answer.lower()
    return sum(string.lower() in text for string in needles) / len(needles)


def share_of_set(answer: str, needles: Sequence[str]) -> float:
    """Returns the share of wanted strings among an answer's parts between commas.

    Exact match, as a set: a repeated part counts once, and a number with a digit too
    many is wrong. Source: RAT, appendix C.4. A sentence's end and an "and" before the
    last part do not count as part of it.
    """
    # Only the first line is the answer; models often continue to a next question.
    parts = {
        part.strip().removeprefix("and ").strip().rstrip(".").lower()
        for part in answer.strip().split("\n")[0].split(",")
    }
    strings = {string.lower() for string in needles}
    return len(strings & parts) / len(strings)


def same_characters(answer: str, needles: Sequence[str]) -> float:
    """Returns the share of the wanted characters that an answer has in their places.

    The wanted answer is the strings in the question's order with ", " between them.
    Guessing gives 0.10 for numbers.
    """
    wanted = ", ".join(needles).lower()
    given = answer.strip().lower()
    return sum(map(str.__eq__, wanted, given)) / len(wanted)


def _in_lines(
    form: NeedleSetting, needles: list[str], size: int, rng: np.random.Generator
) -> str:
    lines = [NOISE] * size
    if form.haystack == "needle":
        lines = [
            NEEDLE.format(
                kind=form.value,
                key=_drawn(form.key, rng),
                value=_drawn(form.value, rng),
            )
            for _ in range(size)
        ]
    # From the back, so that a needle does not move the places of those before it.
    places = sorted(rng.choice(size, len(needles), replace=False), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _drawn(kind: Kind, rng: np.random.Generator) -> str:
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    adjectives, nouns = wonderwords("adjectivelist"), wonderwords("nounlist")
    return (
        f"{adjectives[rng.integers(len(adjectives))]}-{nouns[rng.integers(len(nouns))]}"
    )


@lru_cache
def wonderwords(name: str) -> tuple[str, ...]:
    """Returns the different words of one of the package's lists, sorted.

    Raises:
      UserError: the package is not installed.
    """
    try:
        text = (files("wonderwords") / "assets" / f"{name}.txt").read_text("utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise UserError(
            "the keys of needles are words of the package wonderwords: pip "
            "install 'recurjax[ruler]'"
        ) from error
    return tuple(sorted({word.strip() for word in text.splitlines()} - {""}))
