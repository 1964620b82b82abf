"""RULER's items against its definitions, and both scores."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from recurjax.data.corpora import embedded_text
from recurjax.data.tokenizers import ByteTokenizer, Symbols
from recurjax.errors import UserError
from recurjax.evaluation.ruler import (
    NEEDLES,
    TASKS,
    RulerMaker,
    rat_share,
    string_match,
    tasks,
)
from tests.cli.commands import assert_refused, recurjax

LISTS = {
    "nounlist": [f"noun{n}" for n in range(4000)],
    "adjectivelist": [f"big{n}" for n in range(50)],
    "verblist": [f"go{n}" for n in range(50)],
}


@pytest.fixture(autouse=True)
def words(monkeypatch):
    """Stands for the package, which is an extra."""

    def listed(*names):
        return tuple(sorted(word for name in names for word in LISTS[name]))

    monkeypatch.setattr(tasks, "wonderwords", listed)


class Words(ByteTokenizer):
    """Another tokenizer: a token a word."""

    def encode(self, text):
        return np.zeros(len(text.split()), np.int32)


def maker(task, tokens=4096, tokenizer=None):
    text = embedded_text()[:200_000]
    tokenizer = tokenizer or ByteTokenizer()
    return RulerMaker(task=task, tokens=tokens, tokenizer=tokenizer, text=text)


def needles_of(prompt):
    form = r"One of the special magic (\w+) for (\S+) is: (\S+)\."
    return re.findall(form, prompt)


@pytest.mark.parametrize("task", NEEDLES)
def test_needles_are_told_once_and_asked_for(task):
    form = NEEDLES[task]
    made = maker(task).item(3)
    told: dict[str, list[str]] = {}
    for kind, key, value in needles_of(made.prompt):
        assert kind == form.value
        told.setdefault(key, []).append(value)
    assert len(made.wanted) == form.values * form.queries
    pattern = r"\d{7}" if form.value == "numbers" else r"[0-9a-f]{8}-[0-9a-f]{4}-4\S+"
    assert all(re.fullmatch(pattern, value) for value in made.wanted)
    last = made.prompt.splitlines()[-1]
    asked = [key for key in told if f" {key}" in last]
    assert len(asked) == form.queries
    assert sorted(made.wanted) == sorted(v for key in asked for v in told[key])
    if form.haystack != "needle":
        assert len(told) == form.keys
    single = len(made.wanted) == 1
    assert made.prompt.startswith("A special" if single else "Some special")
    end = "mentioned in the provided text " + ("is" if single else "are")
    assert made.prompt.endswith(end)


@pytest.mark.parametrize("task", TASKS)
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
    for task in ("niah_single_1", "niah_single_2", "vt"):
        made = maker(task, tokens, tokenizer)
        for number in range(3):
            prompt = made.item(number).prompt
            length = len(tokenizer.encode(prompt)) + 1 + tasks.MOST[task]
            assert tokens - max(200, tokens // 25) < length <= tokens


def test_needles_lie_at_all_depths():
    made = maker("niah_single_2", 2048)
    depths = []
    for number in range(60):
        prompt = made.item(number).prompt
        depths.append(prompt.index("One of the special") / len(prompt))
    assert min(depths) < 0.2 and max(depths) > 0.7


def test_a_variables_value_goes_along_its_chain():
    made = maker("vt").item(0)
    told = dict(re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", made.prompt))
    value = re.findall(r"assigned the value (\d+)", made.prompt)[0]
    assert told[made.wanted[0]] == value
    for before, after in zip(made.wanted, made.wanted[1:], strict=False):
        assert told[after] == before
    assert len(made.wanted) == 5 and made.prompt.endswith("they are:")


def test_common_words_are_the_ten_that_come_most_often():
    for tokens, often in ((2048, 6), (8192, 30)):
        made = maker("cwe", tokens).item(1)
        listed = made.prompt.rpartition("Memorize the ones")[2]
        counts = Counter(re.findall(r"\d+\. (\w+)", listed))
        assert {w for w, n in counts.most_common(10)} == set(made.wanted)
        assert {n for _, n in counts.most_common(10)} == {often}


def test_frequent_words_follow_zetas_law():
    made = maker("fwe").item(1)
    text = made.prompt.partition("coded words. ")[2].partition("\n")[0]
    counts = Counter(text.split()).most_common(4)
    assert counts[0][0] == "..." and [w for w, _ in counts[1:]] == list(made.wanted)
    assert counts[0][1] == pytest.approx(4 * counts[1][1], abs=4)


def test_scores_are_rulers_and_rats():
    wanted = ("1234567", "7654321")
    assert string_match(" are 1234567, and 12345678.", wanted) == 0.5
    assert string_match("7654321 1234567", wanted) == 1.0
    assert string_match("ABC", ("abc",)) == 1.0
    assert rat_share(" 1234567, and 7654321.", wanted) == 1.0
    assert rat_share("7654321, 7654321", wanted) == 0.5
    assert rat_share("12345678", ("1234567",)) == 0.0  # a digit too many
    assert string_match("12345678", ("1234567",)) == 1.0
    assert rat_share("1234567\nmore, 7654321", wanted) == 0.5


def test_what_does_not_fit_or_is_unknown_is_told():
    with pytest.raises(UserError, match="no task niah_single: did you mean niah_si"):
        maker("niah_single")
    least = "cwe needs at least [0-9]+ tokens .* got 300: .* --length"
    with pytest.raises(UserError, match=least):
        maker("cwe", 300).item(0)
    empty = RulerMaker(
        task="niah_single_2", tokens=512, tokenizer=Symbols(9), text=" \n"
    )
    with pytest.raises(UserError, match="haystack has no words"):
        empty.item(0)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.undo()
    tasks.wonderwords.cache_clear()

    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tasks, "files", missing)
    with pytest.raises(UserError, match=r"pip install 'recurjax\[ruler\]'"):
        tasks.wonderwords("nounlist")


@pytest.mark.slow
def test_the_command_scores_a_run(tmp_path):
    from recurjax.convert.imported_run import new_experiment, write_run
    from tests.variants.latent_recurrent_transformer.switches import byte_model

    model, run = byte_model(None), tmp_path / "run"
    write_run(run, model, new_experiment(run, model.config, length=64), ByteTokenizer())
    words = ("--length", 768, "--limit", 2, "--batch", 2)
    code, out, err = recurjax("evaluate", run, "--ruler", "niah_single_2", *words)
    assert code == 0, err
    found = json.loads(out)["tasks"]["ruler/niah_single_2"]
    assert (found["n"], found["tokens"]) == (2, 768)
    assert found["haystack"] == "embedded text" and 0 <= found["string_match"] <= 1
    for words, pattern in [
        (("--ruler", "nia"), "no task nia"),
        (("--ruler", "vt", "--haystack", tmp_path / "no"), "--haystack: a file cannot"),
        (("--haystack", "a"), "--haystack goes with --ruler"),
    ]:
        assert_refused(recurjax("evaluate", run, *words), pattern)
