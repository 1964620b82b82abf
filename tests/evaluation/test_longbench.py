"""LongBench: prompts and where they are cut, where answers end, and each metric."""

import json
import sys

import numpy as np
import pytest

from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.longbench import TASKS, evaluate_longbench, read_longbench
from recurjax.evaluation.longbench import metrics as room
from recurjax.evaluation.longbench.evaluate import Item, longbench_cut, rat_cut
from recurjax.evaluation.longbench.evaluate import question as asked
from tests.cli.commands import assert_refused, recurjax
from tests.variants.latent_recurrent_transformer.switches import byte_model


def item(context="a story", asks="who?", answers=("Ann", "the Ann of it"), classes=()):
    return {
        "context": context,
        "input": asks,
        "answers": list(answers),
        "all_classes": list(classes) or None,
        "length": 2,
    }


@pytest.fixture
def folder(tmp_path):
    def put(**files):
        for name, items in files.items():
            lines = [json.dumps(one) for one in items]
            file = tmp_path / f"{name.replace('_p', '-p')}.jsonl"
            file.write_text("\n".join(lines) + "\n")
        return tmp_path

    return put


class Scripted(Evaluator):
    """Answers by the task's name, and keeps what it was asked."""

    def answers(self, questions, *, name):
        Scripted.asked[name] = questions
        return [Scripted.says[name]] * len(questions)

    asked, says = {}, {}  # noqa: RUF012


@pytest.fixture
def evaluator():
    return Scripted(model=byte_model(None), tokenizer=ByteTokenizer(), window=900)


def test_answers_are_cut_in_two_ways_and_the_best_right_one_counts(evaluator, folder):
    directory = folder(
        hotpotqa=[item(), item(answers=("Bob",))],
        trec=[item(answers=("City",), classes=("City", "State"))],
        lcc=[item(answers=("x = 1",))],
    )
    Scripted.says |= {
        "hotpotqa": "\nAnn\nQuestion: where? Bob",
        "trec": "\nCity\nState",
        "lcc": "# a comment\nx = 2\n",
    }
    rows = evaluate_longbench(evaluator, read_longbench(directory), limit=None)
    got = {(row.task, row.metric): row for row in rows}
    hop = got["longbench/hotpotqa", "f1"]
    assert (hop.value, hop.n, hop.settings) == (0.5, 2, {"tokens": 900})
    # LongBench cuts nothing here: 1 of 4 words, 1 of 1 wanted, twice.
    whole = got["longbench/hotpotqa", "f1_longbench"]
    assert whole.value == pytest.approx(2 * 0.25 / 1.25)
    assert got["longbench/trec", "classification"].value == 0.5
    assert got["longbench/trec", "classification_longbench"].value == 1.0
    # "x = 2" and "x = 1" share 4 of 5 characters.
    assert got["longbench/lcc", "edit_similarity"].value == 0.8
    one = evaluate_longbench(evaluator, read_longbench(directory), limit=1)
    assert {(row.n, row.limit) for row in one} == {(1, 1)}


def test_a_long_prompt_loses_its_middle_beside_the_answer(evaluator):
    task = TASKS["hotpotqa"]
    short = asked(evaluator, task, Item("a {input} b", "why?", ("x",), ()))
    text = bytes(short.prompt[1:]).decode()
    assert short.prompt[0] == 256 and short.most == 32
    assert text == task.prompt.format(context="a {input} b", input="why?")
    long = asked(evaluator, task, Item("0123456789" * 200, "why?", ("x",), ()))
    assert len(long.prompt) == 900 - 32
    told = bytes(long.prompt[1:]).decode()
    assert told.startswith("Answer the question") and told.endswith("why?\nAnswer:")
    assert long.sampling.repetition_penalty == 1.0 and long.sampling.temperature == 0
    summary = asked(evaluator, TASKS["qmsum"], Item("long", "why?", ("x",), ()))
    assert summary.sampling.repetition_penalty == 1.2 and summary.most == 512
    with pytest.raises(UserError, match="no room for a prompt beside 512 new tokens"):
        narrow = Scripted(model=byte_model(None), tokenizer=ByteTokenizer(), window=512)
        asked(narrow, TASKS["qmsum"], Item("long", "why?", ("x",), ()))


def test_answers_end_where_rat_and_longbench_say():
    said = "\n\nAnn.\nQuery: b\nQuestion: c"
    assert rat_cut(TASKS["qmsum"], said) == "Ann."
    assert rat_cut(TASKS["qasper"], said) == "Ann.\nQuery: b"
    assert rat_cut(TASKS["gov_report"], said) == said
    assert longbench_cut(TASKS["samsum"], said) == "Ann."
    assert longbench_cut(TASKS["qasper"], said) == said


def test_metrics_are_longbenchs():
    assert room.f1("The cat, sat.", "a cat sat down") == pytest.approx(0.8)
    assert room.f1("The", "a") == room.f1("", "a") == 0.0
    classes = ("Other", "Other location", "City", "State")
    assert room.classification("a City or State", "City", classes) == 0.5
    # The shorter name goes, as it lies within the right one's.
    right = "Other location"
    assert room.classification("Other location", right, classes) == 1.0
    assert room.classification("City", right, classes) == 0.0
    # LongBench's loop skips what comes after a name that it takes away.
    inner = ("a", "ab", "abc")
    assert room.classification("abc", "abc", inner) == 0.5
    assert room.count("3 or 4, I say 3", "3") == pytest.approx(2 / 3)
    assert room.count("none", "3") == 0.0
    assert room.retrieval("Paragraph 7", "Paragraph 7") == 1.0
    assert room.retrieval("7 or 17", "Paragraph 17") == 0.5
    assert room.edit_similarity("```\nreturn a", "return b") == 0.88
    assert room.edit_similarity("# nothing", "return b") == 0.0


PAIRS = [
    ("return a", "return b"),
    ("for i in range(3):", "for j in range(30):"),
    ("x = foo(bar)", "y = bar(foo)"),
]


def test_edit_similarity_is_the_packages():
    fuzz = pytest.importorskip("fuzzywuzzy.fuzz", reason="needs pip install fuzzywuzzy")
    for said, right in PAIRS:
        assert room.edit_similarity(said, right) == fuzz.ratio(said, right) / 100


def test_rouge_is_the_packages():
    """A summary of three of five words, and one over two sentences."""
    pytest.importorskip("rouge", reason="needs pip install 'recurjax[longbench]'")
    # Words in common: the cat sat. P 3/3, R 3/5.
    assert room.rouge_l("the cat sat", "the cat sat on mats") == pytest.approx(0.75)
    assert room.rouge_l("a b. c d.", "c d. a b.") == pytest.approx(1.0)
    assert room.rouge_l("", "words") == room.rouge_l(" . ", "words") == 0.0


def test_a_missing_package_is_told_before_anything_is_read(
    evaluator, folder, monkeypatch
):
    monkeypatch.setitem(sys.modules, "rouge", None)
    directory = folder(qmsum=[item()])
    with pytest.raises(UserError, match=r"pip install 'recurjax\[longbench\]'"):
        evaluate_longbench(evaluator, read_longbench(directory), limit=None)


def test_other_files_are_told_in_a_sentence(folder, tmp_path):
    run = tmp_path / "no run"
    for files, pattern in [
        ({"other": [{"a": 1}]}, "has none of LongBench's English files"),
        ({"lcc": [{"context": "a"}]}, "line 1 is no item of LongBench"),
        ({"lcc": [[1]]}, "line 1 is no item of LongBench"),
        ({"lcc": [item(answers=())]}, "line 1 is no item of LongBench"),
    ]:
        answer = recurjax("evaluate", run, "--longbench", folder(**files))
        assert_refused(answer, pattern)
    (tmp_path / "lcc.jsonl").write_text("{")
    with pytest.raises(UserError, match=r"lcc.jsonl is not a file of JSON lines"):
        read_longbench(tmp_path)
    with pytest.raises(UserError, match="there is no directory"):
        read_longbench(tmp_path / "none")


def test_prompts_hold_the_document_and_the_question_once():
    for name, task in TASKS.items():
        assert task.prompt.count("{context}") == 1, name
        assert task.prompt.count("{input}") <= 1
        bare = task.prompt.replace("{context}", "").replace("{input}", "")
        assert "{" not in bare and np.isin(task.most, (32, 64, 128, 512))
