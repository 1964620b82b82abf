"""RULER's items, made from numbers: which words, where, and how large a haystack.

Source: Hsieh et al. 2024 and its public `scripts/synthetic.yaml`: the templates, sizes
and depths are its own. An item is a function of (task, tokens, seed, split, number);
the public generator draws all items of a task from one stream.

Departs from it in what is hidden in: the essays it downloads are in no package, so the
haystack is a text that is named, the embedded one unless told otherwise.
"""

import difflib
import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from typing import Literal, NamedTuple

import numpy as np

from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    "There and back again."
)
NIAH = (
    "Some special magic {kind} are hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the {kind} afterwards.\n{context}\nWhat are "
    "all the special magic {kind} for {query} mentioned in the provided text? The "
    "special magic {kind} for {query} mentioned in the provided text are"
)
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following "
    "text.\n\n{context}\nQuestion: Find all variables that are assigned the value "
    "{query} in the text above. Answer: According to the chain(s) of variable "
    "assignment in the text above, {count} variables are assigned the value {query}, "
    "they are: "
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than "
    "others. Memorize the ones that appear most often.\n{context}\nQuestion: What are "
    "the 10 most common words in the above list? Answer: The top 10 words that appear "
    "most often in the list are:"
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find "
    "the three most frequently appeared coded words. {context}\nQuestion: Do not "
    "provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text? Answer: According to the coded "
    "text above, the three most frequently appeared words are:"
)

DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int)
"""Places of needles in a text, in percent of its sentences."""

SPLITS = ("train", "validation")
Kind = Literal["words", "numbers", "uuids"]


class Needles(NamedTuple):
    """What is hidden where, and how much of it is asked for.

    Attributes:
      haystack: "text", "noise" (one line again and again) or "needle" (others of them).
      key, value: what a needle's two halves are.
      keys, values, queries: needles' keys, values of each key, keys that are asked for.
    """

    haystack: Literal["text", "noise", "needle"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", value="uuids"),
    "niah_multikey_1": Needles("text", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": Needles("text", values=4),
    "niah_multiquery": Needles("text", keys=4, queries=4),
}
"""The eight of RAT's table 12."""

MOST = dict.fromkeys(NEEDLES, 128) | {"vt": 30, "cwe": 120, "fwe": 50}
TASKS = tuple(MOST)
"""All tasks, and how many tokens are generated for each."""


class RulerItem(NamedTuple):
    """One prompt, up to where the answer begins, and the strings it should have."""

    prompt: str
    wanted: tuple[str, ...]


def check_known(names: Sequence[str]) -> None:
    """Raises UserError for a name that is none of the tasks."""
    for name in names:
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(TASKS)}"
            raise UserError(f"RULER has no task {name}: {hint}")


@dataclass(frozen=True, kw_only=True)
class RulerMaker:
    """Makes a task's items of at most `tokens` tokens, prompt and answer together.

    Attributes:
      task: one of `TASKS`.
      tokens: what a prompt and its answer may have, by `tokenizer`, BOS included.
      tokenizer: of the model that is asked.
      text: the haystack where one is a text.
      seed: of everything drawn.
    """

    task: str
    tokens: int
    tokenizer: Tokenizer
    text: str
    seed: int = 42

    def __post_init__(self):
        check_known([self.task])

    def item(self, number: int, *, split: str = "validation") -> RulerItem:
        """Returns item `number`; the largest haystack that fits, or a little less.

        Raises:
          UserError: not even the smallest haystack fits.
        """
        # Found with item 0 and taken for all: bisection for each would encode every
        # haystack a dozen times.
        size = self.size
        while size >= self._smallest:
            made = self._draw(size, number, split)
            if self._length(made.prompt) <= self.tokens:
                return made
            # This item's words have more tokens than those the size was found with.
            size -= max(1, size // 50)
        raise self._too_short()

    @cached_property
    def size(self) -> int:
        """The largest haystack with which a first item fits, found by bisection.

        Raises:
          UserError: not even the smallest one fits.
        """

        def fits(size: int) -> bool:
            # Words are drawn without repetition, so their number limits the list.
            if self.task == "cwe" and size > len(_all_words()):
                return False  # there are no more words to list
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
        return len(self.tokenizer.encode(prompt)) + bos + MOST[self.task]

    def _too_short(self) -> UserError:
        least = self._length(self._draw(self._smallest, 0, "validation").prompt)
        return UserError(
            f"{self.task} needs at least {least} tokens by this tokenizer, got "
            f"{self.tokens}: ask for longer rows, by evaluate's --length"
        )

    @property
    def _smallest(self) -> int:
        if self.task in NEEDLES:
            form = NEEDLES[self.task]
            # A text of at least twenty words; otherwise a line for each needle.
            return 20 if form.haystack == "text" else form.keys * form.values
        return {"vt": 5, "cwe": 11, "fwe": 60}[self.task]

    def _draw(self, size: int, number: int, split: str) -> RulerItem:
        # Item, task and split are the key: an item does not depend on those before it.
        key = [self.seed, TASKS.index(self.task), SPLITS.index(split), number]
        rng = np.random.default_rng(key)
        if self.task in NEEDLES:
            return self._needles(NEEDLES[self.task], size, rng)
        make: dict[str, Callable[[int, np.random.Generator], RulerItem]] = {
            "vt": _variables,
            "cwe": self._common_words,
            "fwe": self._frequent_words,
        }
        return make[self.task](size, rng)

    def _needles(self, form: Needles, size: int, rng: np.random.Generator) -> RulerItem:
        keys = [_drawn(form.key, rng) for _ in range(form.keys)]
        values = [[_drawn(form.value, rng) for _ in range(form.values)] for _ in keys]
        needles = [
            NEEDLE.format(kind=form.value, key=key, value=value)
            for key, own in zip(keys, values, strict=True)
            for value in own
        ]
        needles = [needles[at] for at in rng.permutation(len(needles))]
        if form.haystack == "text":
            context = self._in_text(needles, size, rng)
        else:
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
            # From the back, so that a place is not moved by a needle put in before it.
            places = sorted(rng.choice(size, len(needles), replace=False), reverse=True)
            for place, needle in zip(places, needles, strict=True):
                lines.insert(place, needle)
            context = "\n".join(lines)
        asked = rng.choice(form.keys, form.queries, replace=False)
        queries = [keys[at] for at in asked]
        query = queries[0]
        if len(queries) > 1:
            query = ", ".join(queries[:-1]) + ", and " + queries[-1]
        template, kind = NIAH, str(form.value)
        if form.queries * form.values == 1:  # one answer is asked for in the singular
            for several, one in (
                ("Some", "A"),
                ("are all", "is"),
                # As the public templates do it, word by word.
                ("are", "is"),
            ):
                template = template.replace(several, one)
            kind = kind[:-1]
        prompt = template.format(kind=kind, context=context, query=query)
        wanted = tuple(value for at in asked for value in values[at])
        return RulerItem(prompt, wanted)

    def _in_text(self, needles: list[str], size: int, rng: np.random.Generator) -> str:
        # The text again and again, where it is shorter than what is asked for.
        words = self._words
        text = " ".join((words * -(-size // len(words)))[:size])
        # Above all a rule that gives the same sentences on every machine.
        # Where a sentence ends; the public generator asks a tokenizer of sentences.
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

    def _common_words(self, size: int, rng: np.random.Generator) -> RulerItem:
        few = self.tokens < 4096
        words = _all_words()
        shown = _word_list(words, 20 if few else 40, (3, 1) if few else (10, 3), rng)
        asked = _word_list(words, size, (6, 1) if few else (30, 3), rng)
        numbered = " ".join(f"{n + 1}. {word}" for n, word in enumerate(shown.wanted))
        example = CWE.format(context=shown.prompt) + " " + numbered
        prompt = f"{example}\n{CWE.format(context=asked.prompt)}"
        return RulerItem(prompt, asked.wanted)

    def _frequent_words(self, size: int, rng: np.random.Generator) -> RulerItem:
        count = max(4, (self.tokens - MOST["fwe"]) // 50)
        names: dict[str, None] = {}
        while len(names) < count:
            names[_letters(6, rng, string.ascii_lowercase)] = None
        vocabulary = ["...", *list(names)[1:]]  # the most frequent word is noise
        # Zeta's distribution with alpha 2: the share of rank k is k^-2 / zeta(2).
        ranks = np.arange(1, count + 1)
        copies = (size * ranks**-2.0 / (np.pi**2 / 6)).astype(int)
        words = [
            word for word, n in zip(vocabulary, copies, strict=True) for _ in "." * n
        ]
        text = " ".join(words[at] for at in rng.permutation(len(words)))
        return RulerItem(FWE.format(context=text), tuple(vocabulary[1:4]))


def _variables(size: int, rng: np.random.Generator) -> RulerItem:
    hops = 4
    names: dict[str, None] = {}
    while len(names) < hops + 1:
        names[_letters(5, rng, string.ascii_uppercase)] = None
    chain = list(names)
    value = str(rng.integers(10_000, 99_999))
    lines = [f"VAR {chain[0]} = {value}"]
    # A chain: each variable is assigned the one before it.
    lines += [
        f"VAR {after} = VAR {before} "
        for before, after in zip(chain, chain[1:], strict=False)
    ]
    text = [NOISE] * size
    places = np.sort(rng.choice(size, len(lines), replace=False))
    # Places are of the text without lines; each line that was put in moves the next.
    for moved, (place, line) in enumerate(zip(places, lines, strict=True)):
        text.insert(place + moved, line)
    context = "\n".join(text).replace(". \n", ".\n")
    prompt = VT.format(context=context, query=value, count=hops + 1)
    # A prompt ends before the space that the answer's first word brings.
    return RulerItem(prompt.rstrip(" "), tuple(chain))


def _word_list(
    words: Sequence[str],
    size: int,
    repeats: tuple[int, int],
    rng: np.random.Generator,
) -> RulerItem:
    """Lists ten words often and the others seldom, mixed and numbered."""
    picked: list[int] = rng.choice(len(words), size, replace=False).tolist()
    chosen = [words[at] for at in picked]
    often, seldom = chosen[:10], chosen[10:]
    mixed = often * repeats[0] + seldom * repeats[1]
    mixed = [mixed[at] for at in rng.permutation(len(mixed))]
    text = " ".join(f"{n + 1}. {word}" for n, word in enumerate(mixed))
    return RulerItem(text, tuple(often))


def _drawn(kind: Kind, rng: np.random.Generator) -> str:
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    adjectives, nouns = wonderwords("adjectivelist"), wonderwords("nounlist")
    return (
        f"{adjectives[rng.integers(len(adjectives))]}-{nouns[rng.integers(len(nouns))]}"
    )


def _letters(count: int, rng: np.random.Generator, alphabet: str) -> str:
    return "".join(alphabet[at] for at in rng.integers(len(alphabet), size=count))


def _all_words() -> tuple[str, ...]:
    return wonderwords("nounlist", "adjectivelist", "verblist")


@lru_cache
def wonderwords(*lists: str) -> tuple[str, ...]:
    """Returns the different words of the package's lists, sorted.

    Raises:
      UserError: the package is not installed.
    """
    try:
        folder = files("wonderwords") / "assets"
        found = {
            word.strip()
            for one in lists
            for word in (folder / f"{one}.txt").read_text("utf-8").splitlines()
        }
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise UserError(
            "RULER's keys are words of a package that is not here: "
            "pip install 'recurjax[ruler]'"
        ) from error
    return tuple(sorted(found - {""}))
