"""LongBench over a folder: items, where answers end, and scores of the same answers."""

import json
import re

import pytest

from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.offline_tasks import longbench
from tests.variants.latent_recurrent_transformer.switches import byte_model

SCORES = [
    # task, answer, right answers, classes, score as LongBench ends it, as RAT does
    ("hotpotqa", "\nAnn\nQuestion: where? Bob", ["Ann", "the Ann of it"], [], 0.4, 1.0),
    ("narrativeqa", "The cat, sat.", ["a cat sat down"], [], 0.8, 0.8),
    ("triviaqa", "\nAnn B\nQuestion: d", ["Ann"], [], 2 / 3, 2 / 3),
    ("trec", "\nCity\nState", ["City"], ["City", "State"], 1.0, 0.5),
    ("trec", "Other place", ["Other place"], ["Other", "Other place"], 1.0, 1.0),
    ("trec", "abc", ["abc"], ["a", "ab", "abc"], 0.5, 0.5),
    ("passage_count", "3 or 4, I say 3", ["3"], [], 2 / 3, 2 / 3),
    ("passage_count", "none", ["3"], [], 0.0, 0.0),
    ("passage_retrieval_en", "7 or 17", ["Paragraph 17"], [], 0.5, 0.5),
    ("lcc", "# a comment\nx = 2\n", ["x = 1"], [], 0.8, 0.8),
    ("lcc", "```\nreturn a", ["return b"], [], 0.88, 0.88),
    ("repobench-p", "# nothing", ["return b"], [], 0.0, 0.0),
    ("qmsum", "\n\nthe cat sat.\nQuery: b", ["the cat sat on mats"], [], 0.6, 0.75),
    ("gov_report", "a b. c d.", ["c d. a b."], [], 1.0, 1.0),
    ("gov_report", " . ", ["c d. a b."], [], 0.0, 0.0),
    ("samsum", "\nthe cat sat\nmore", ["the cat sat on mats"], [], 0.75, 2 / 3),
]
"""Recorded from this package's own metrics of LongBench, which the harness' replace."""


def item(context="a story", asks="who?", answers=("Ann",), classes=()):
    return {
        "context": context,
        "input": asks,
        "answers": list(answers),
        "all_classes": list(classes) or None,
        "length": 2,
    }


def write(folder, name, items):
    lines = "".join(json.dumps(item) + "\n" for item in items)
    (folder / f"{name}.jsonl").write_text(lines)


class Scripted(Evaluator):
    """Gives the answer whose number the prompt names."""

    def answers(self, questions, *, name):
        prompts = [bytes(question.prompt[1:]).decode() for question in questions]
        numbers = [re.search(r"<(\d+)>", prompt) for prompt in prompts]
        return [SCORES[int(matches[1])][1] for matches in numbers if matches]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_harness_scores_the_same_answers_alike(tmp_path):
    pytest.importorskip("lm_eval", reason="needs pip install 'recurjax[harness]'")
    for package in ("rouge", "jieba", "fuzzywuzzy"):
        pytest.importorskip(package, reason="needs pip install 'recurjax[longbench]'")
    from recurjax.evaluation.harness import HarnessModel, evaluate_harness

    names = dict.fromkeys(row[0] for row in SCORES)
    for name in names:
        items = [
            item(f"<{number}>", answers=row[2], classes=row[3])
            for number, row in enumerate(SCORES)
            if row[0] == name
        ]
        write(tmp_path, name, items)
    model = HarnessModel(
        Scripted(model=byte_model(None), tokenizer=ByteTokenizer(), window=4096)
    )
    _, rows = evaluate_harness(model, ["offline_longbench"], longbench=tmp_path)
    got = {(row.task, row.metric): row for row in rows}
    for name in names:
        task = [row for row in SCORES if row[0] == name]
        for metric, column in (("score", 4), ("score (rat)", 5)):
            row = got[f"offline_longbench_{name}", metric]
            want = sum(scores[column] for scores in task) / len(task)
            assert row.value == pytest.approx(want, abs=1e-6), (name, metric)
            assert row.n == len(task)
    assert got["offline_longbench_lcc", "score"].settings["tokens"] == 4096
    settings = got["offline_longbench_qmsum", "score"].settings
    assert settings["repetition_penalty"] == 1.2
    with pytest.raises(UserError, match="no task offline_longbench_x"):
        evaluate_harness(model, ["offline_longbench_x"], longbench=tmp_path)
    with pytest.raises(UserError, match="name their folder with --longbench"):
        evaluate_harness(model, ["offline_longbench"])


def test_files_of_another_format_are_refused(tmp_path):
    file = tmp_path / "lcc.jsonl"
    for text, pattern in [
        ('{"context": "a"}', "line 1 of .* must have context, input"),
        ("[1]", "line 1 of .* must have context, input"),
        (json.dumps(item(answers=())), "line 1 of .* must have context, input"),
        ("{", "line 1 of .*lcc.jsonl"),
        ("", "has no items"),
    ]:
        file.write_text(text)
        with pytest.raises(UserError, match=pattern):
            longbench.read_items(file=str(file))
    with pytest.raises(UserError, match="has none of LongBench's English files"):
        longbench.write_tasks(tmp_path / "none", tmp_path, window=9)
