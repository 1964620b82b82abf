"""What a killed evaluation leaves, and what the next one asks."""

import json

import numpy as np
import pytest

from recurjax.data.tokenizers import Symbols, TextSettings
from recurjax.errors import UserError
from recurjax.evaluation import rows as evaluations
from recurjax.evaluation.answerer import Answerer, Question
from recurjax.evaluation.journal import Journal, key_of
from recurjax.evaluation.rows import Row, append_rows, markdown, read_rows
from recurjax.evaluation.scorer import Pair, Scorer
from recurjax.inference.sampling import SamplingConfig
from tests.variants.transformer.switches import SWITCHES, build


@pytest.fixture(scope="module")
def model():
    return build(next(iter(SWITCHES.values())))


class Killed(Exception):
    pass


def test_a_journal_has_what_was_written_but_half_a_line(tmp_path):
    file = tmp_path / "more" / "answers.jsonl"
    journal = Journal(file)
    journal.add([(key_of("a", 1), "one"), (key_of("b"), ["two", 2])])
    file.write_text(file.read_text() + '["c", "th')
    again = Journal(file)
    assert len(again) == 2
    assert again[key_of("a", 1)] == "one" and key_of("a") not in again
    again.add([(key_of("c"), None)])
    assert len(Journal(file)) == 3
    again.close()
    assert not file.parent.exists()


@pytest.mark.parametrize("damage", [b"\0" * 9, b"[1, 2]", b"{}", b"\xff", b"[" * 5000])
def test_a_damaged_line_is_asked_again(tmp_path, damage):
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b'["a", 1]\n' + damage + b'\n["b", 2]\n')
    journal = Journal(file)
    assert len(journal) == 2 and (journal["a"], journal["b"]) == (1, 2)


def test_a_killed_evaluation_goes_on_by_item(model, tmp_path):
    pairs = [Pair((n, n + 1), (n + 2,)) for n in range(5)]
    pairs.append(pairs[0])  # requested twice, read once
    want = Scorer(model=model, rows=2)(pairs)
    file = tmp_path / "answers.jsonl"
    asked = []

    def kill(done):
        asked.append(done)
        if len(asked) == 3:  # after one batch was kept
            raise Killed

    with pytest.raises(Killed):
        Scorer(model=model, rows=2, report=kill)(pairs, Journal(file))
    assert asked == [1, 2, 2]  # the pair that comes twice counts at once
    known = len(Journal(file))
    assert known == 2
    asked.clear()
    scorer = Scorer(model=model, rows=2, report=asked.append)
    got = scorer(pairs, Journal(file))
    assert asked == [len(pairs) - 3, 2, 1]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.log_p == pytest.approx(theirs.log_p, rel=1e-5)
        assert mine.greedy == theirs.greedy
        np.testing.assert_allclose(mine.nats, theirs.nats, rtol=1e-5)


@pytest.mark.slow
def test_answers_are_those_of_each_prompt_alone(model, tmp_path):
    symbols = Symbols(model.config.vocabulary)
    sampling = SamplingConfig(temperature=1.0)
    questions = [
        Question((1, 2, 4), 5),
        Question((5,), 5),
        Question((7, 8, 9, 10), 5, sampling=sampling),
        Question((6, 5), 5, sampling=sampling),
    ]
    answerer = Answerer(model=model, tokenizer=symbols, rows=2)
    journal = Journal(tmp_path / "answers.jsonl")
    texts = answerer(questions, journal)
    # Alone, and a drawn one at its place in the call: its stream hangs on that.
    assert answerer(questions[1:2])[0] == texts[1]
    assert answerer([questions[0]] * 3 + questions[3:])[3] == texts[3]
    # An answer ends before its stop string, wherever that comes first.
    stop = f" {texts[0].split()[-1]}"
    stopped = answerer([questions[0]._replace(stop=(stop,))])[0]
    assert stopped == texts[0][: texts[0].index(stop)]
    # No request runs twice.
    done = []
    again = Answerer(model=model, tokenizer=symbols, rows=2, report=done.append)
    assert again(questions, Journal(tmp_path / "answers.jsonl")) == texts
    assert done == [4]
    with pytest.raises(UserError, match="must have at least one token"):
        answerer([Question((), 1)])


def test_answers_end_at_each_token_that_the_models_settings_name(model, tmp_path):
    symbols, question = Symbols(model.config.vocabulary), Question((1, 2, 4), 5)
    journal = Journal(tmp_path / "answers.jsonl")
    words = Answerer(model=model, tokenizer=symbols)([question], journal)[0].split()
    end = words[2]
    symbols.settings = TextSettings(generation={"eos_token_id": int(end)})
    # With other ends it is another question: the journal's answer is not taken.
    ended = Answerer(model=model, tokenizer=symbols)([question], journal)[0]
    assert ended.split() == words[: words.index(end)]
    assert len(journal) == 2


def test_rows_come_back_as_a_table_of_the_newest(tmp_path):
    row = Row(step=3, task="pick", metric="accuracy", value=0.5, n=8, stderr=0.1)
    newer = Row(step=3, task="pick", metric="accuracy", value=0.75, n=8, stderr=0.1)
    shown = Row(
        step=3,
        task="pick",
        metric="accuracy",
        value=0.25,
        n=2000,
        limit=2000,
        version="1.0",
        package="suite 2",
        settings={"fewshot": 5},
    )
    append_rows(tmp_path, [row])
    append_rows(tmp_path, [newer, shown])
    assert read_rows(tmp_path) == [row, newer, shown]
    lines = markdown(read_rows(tmp_path)).splitlines()
    assert lines[2:] == [
        "| pick | accuracy | 0.7500 | 0.1000 | 8 | 3 |  |  |",
        "| pick | accuracy | 0.2500 |  | 2,000 | 3 | fewshot 5, limit 2000 | "
        "v1.0, suite 2 |",
    ]
    with pytest.raises(UserError, match="has no evaluations.jsonl: evaluate it first"):
        read_rows(tmp_path / "none")
    with (tmp_path / evaluations.FILE).open("a") as file:
        file.write(json.dumps({"step": 3}) + "\n")
    with pytest.raises(UserError, match="line 4 is not a row of an evaluation"):
        read_rows(tmp_path)


def test_standard_errors_are_those_of_means():
    mean, error = evaluations.mean_and_error([0.0, 1.0, 1.0, 1.0])
    assert (mean, error) == pytest.approx((0.75, 0.25))
    assert evaluations.share_error(0.75, 4) == pytest.approx(0.25)
    assert evaluations.mean_and_error([2.0]) == (2.0, None)
    assert evaluations.share_error(1.0, 1) is None
