"""Needles in haystacks against RULER's definitions, and both scores."""

import hashlib
import re

import numpy as np
import pytest

from recurjax.data.corpora import embedded_text
from recurjax.data.tokenizers import ByteTokenizer, Symbols
from recurjax.errors import UserError
from recurjax.evaluation.offline_tasks import needles
from recurjax.evaluation.offline_tasks.needles import (
    ANSWER_TOKENS,
    NEEDLES,
    NeedleTask,
    read_haystack,
    same_characters,
    share_of_set,
    string_match,
)

LISTS = {
    "nounlist": tuple(sorted(f"noun{n}" for n in range(4000))),
    "adjectivelist": tuple(sorted(f"big{n}" for n in range(50))),
}


@pytest.fixture(autouse=True)
def words(monkeypatch):
    """Replaces the package, which is an extra."""
    monkeypatch.setattr(needles, "wonderwords", LISTS.__getitem__)


class Words(ByteTokenizer):
    """Another tokenizer: a token a word."""

    def encode(self, text):
        return np.zeros(len(text.split()), np.int32)


def maker(task, tokens=4096, tokenizer=None):
    text = embedded_text()[:200_000]
    tokenizer = tokenizer or ByteTokenizer()
    return NeedleTask(task=task, tokens=tokens, tokenizer=tokenizer, text=text)


def needles_of(prompt):
    form = r"One of the special magic (\w+) for (\S+) is: (\S+)\."
    return re.findall(form, prompt)


@pytest.mark.parametrize("task", NEEDLES)
def test_a_prompt_hides_each_needle_once_and_asks_for_it(task):
    form = NEEDLES[task]
    item = maker(task).item(3)
    hidden: dict[str, list[str]] = {}
    for kind, key, value in needles_of(item.prompt):
        assert kind == form.value
        hidden.setdefault(key, []).append(value)
    assert len(item.answers) == form.values * form.queries
    pattern = r"\d{7}" if form.value == "numbers" else r"[0-9a-f]{8}-[0-9a-f]{4}-4\S+"
    assert all(re.fullmatch(pattern, value) for value in item.answers)
    last = item.prompt.splitlines()[-1]
    asked = [key for key in hidden if f" {key}" in last]
    assert len(asked) == form.queries
    assert sorted(item.answers) == sorted(v for key in asked for v in hidden[key])
    if form.haystack != "needle":
        assert len(hidden) == form.keys
    single = len(item.answers) == 1
    assert item.prompt.startswith("A special" if single else "Some special")
    end = "mentioned in the provided text " + ("is" if single else "are")
    assert item.prompt.endswith(end)


@pytest.mark.parametrize("task", NEEDLES)
def test_an_item_is_made_from_its_numbers_and_splits_differ(task):
    one, other = maker(task, 2048), maker(task, 2048)
    assert one.item(5) == other.item(5) != one.item(6)
    assert one.item(5) != one.item(5, split="train")


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), Words()], ids=["bytes", "words"]
)
@pytest.mark.parametrize("tokens", [512, 4096, 32768])
def test_rows_fill_the_tokens_that_are_there(tokens, tokenizer):
    if tokens == 512 and not isinstance(tokenizer, Words):
        tokens = 1024  # in bytes the smallest haystacks are longer than 512
    for task in ("niah_single_1", "niah_single_2"):
        item = maker(task, tokens, tokenizer)
        for number in range(3):
            prompt = item.item(number).prompt
            length = len(tokenizer.encode(prompt)) + 1 + ANSWER_TOKENS
            assert tokens - max(200, tokens // 25) < length <= tokens


def test_needles_lie_at_all_depths():
    item = maker("niah_single_2", 2048)
    depths = []
    for number in range(60):
        prompt = item.item(number).prompt
        depths.append(prompt.index("One of the special") / len(prompt))
    assert min(depths) < 0.2 and max(depths) > 0.7


DIGESTS = {
    "niah_single_1": "a493583bef0b3e21",
    "niah_single_2": "651caf9c65b85161",
    "niah_single_3": "a37b4b59d37c4203",
    "niah_multikey_1": "a096a654cf3be372",
    "niah_multikey_2": "d7e3e256f15bbc75",
    "niah_multikey_3": "fa4275d9195338cf",
    "niah_multivalue": "e3c44ba090d57018",
    "niah_multiquery": "1db621d86e24f7ea",
}


@pytest.mark.parametrize("task", NEEDLES)
def test_items_stay_what_they_are(task):
    """Figures of earlier evaluations compare only while the prompts stay the same."""
    item = maker(task, 2048).item(3)
    text = repr((item.prompt, item.answers)).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == DIGESTS[task]


def test_scores_are_rulers_and_rats():
    wanted = ("1234567", "7654321")
    assert string_match(" are 1234567, and 12345678.", wanted) == 0.5
    assert string_match("7654321 1234567", wanted) == 1.0
    assert string_match("ABC", ("abc",)) == 1.0
    assert share_of_set(" 1234567, and 7654321.", wanted) == 1.0
    assert share_of_set("7654321, 7654321", wanted) == 0.5
    assert share_of_set("12345678", ("1234567",)) == 0.0  # a digit too many
    assert string_match("12345678", ("1234567",)) == 1.0
    assert share_of_set("1234567\nmore, 7654321", wanted) == 0.5
    assert same_characters(" 1234567, 7654321", wanted) == 1.0
    assert same_characters("1934567", ("1234567",)) == pytest.approx(6 / 7)
    assert same_characters("", wanted) == 0.0


def test_ruler_and_the_harness_score_alike():
    """The harness' own score of RULER, on the same answers."""
    pytest.importorskip("transformers", reason="needs pip install 'recurjax[ruler]'")
    stock = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    wanted = ["1234567", "7654321"]
    for answer in (" are 1234567, and 12345678.", "7654321 1234567", "none", "\n1\t"):
        doc = {"outputs": wanted, "max_length": 4096}
        assert stock.process_results(doc, [answer])["4096"] == string_match(
            answer, wanted
        )


def test_a_haystack_that_does_not_fit_or_has_no_words_is_refused(tmp_path):
    least = "niah_single_2 needs at least [0-9]+ tokens .* got 300: .* --length"
    with pytest.raises(UserError, match=least):
        maker("niah_single_2", 300).item(0)
    empty = NeedleTask(
        task="niah_single_2", tokens=512, tokenizer=Symbols(9), text=" \n"
    )
    with pytest.raises(UserError, match="haystack has no words"):
        empty.item(0)
    with pytest.raises(UserError, match="--haystack: cannot read a file"):
        read_haystack([tmp_path / "no"], seed=1)
    (tmp_path / "a.txt").write_text("some words")
    assert read_haystack([tmp_path / "a.txt"], seed=1) == ("some words", "a.txt", 1)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.undo()
    needles.wonderwords.cache_clear()

    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(needles, "files", missing)
    with pytest.raises(UserError, match=r"pip install 'recurjax\[ruler\]'"):
        needles.wonderwords("nounlist")
