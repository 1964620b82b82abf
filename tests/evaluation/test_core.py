"""CORE's scoring against nanochat's, on stub models."""

import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.evaluation.core import (
    CoreTask,
    fewshot_numbers,
    prompts,
    read_bundle,
    read_tasks,
    score_core,
    score_items,
    shuffled,
    texts,
)
from recurjax.evaluation.scorer import PairScore
from tests.golden.cases import golden_cases, own_case

FILES = golden_cases("latent_recurrent_transformer/core_eval_cases*.json")
OWN = own_case("latent_recurrent_transformer/core_eval_cases*.json")
BOS = 256


def named_cases(path):
    cases = json.loads(path.read_text())
    return {name: case for name, case in cases.items() if isinstance(case, dict)}


NAMES = [
    pytest.param(*file.values, name, id=f"{file.id}-{name}")
    for file in FILES
    for name in named_cases(*file.values)
]


def encode(rows):
    return [[BOS, *row.encode()] for row in rows]


@cache
def stubs(path):
    with np.load(path.with_name(f"{weights_of(path.stem)}.npz")) as file:
        now, last = file["W"], file["U"]

    def stub(ids):
        logits = now[ids]
        logits[:, 1:] += last[ids[:, :-1]]
        return jnp.asarray(logits)

    def letters(ids):
        following = np.where(ids < 256, (ids + 1) % 256, 0)
        following[np.isin(ids, [ord(c) for c in "lst"])] = ord(" ")
        following[ids == ord(" ")] = ord("1")
        return 0.1 * stub(ids) + 5.0 * np.eye(257, dtype=np.float32)[following]

    return {"Stub": scores_by(stub), "StubLM": scores_by(letters)}


def scores_by(logits):
    """Scores pairs with a function of full rows, one pair after another."""

    def score(pairs):
        scored = []
        for context, continuation in pairs:
            ids = np.array([[*context, *continuation]], np.int32)
            log_p = np.asarray(jax.nn.log_softmax(logits(ids)[0].astype(jnp.float32)))
            at = len(context) - 1 + np.arange(len(continuation))
            nats = -log_p[at, list(continuation)]
            greedy = bool((log_p[at].argmax(-1) == continuation).all())
            scored.append(PairScore(-float(nats.sum()), greedy, nats))
        return scored

    return score


def weights_of(cases: str) -> str:
    return cases.replace("core_eval_cases", "core_eval_stub_weights")


def task_of(name, path=OWN):
    case = named_cases(path)[name]
    meta = case["meta"]
    return CoreTask(
        label=name,
        kind=meta["task_type"],
        items=tuple(case["data_in_file_order"]),
        fewshot=meta["num_fewshot"],
        delimiter=meta["continuation_delimiter"],
        baseline=case["random_baseline"],
    )


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_prompts_and_scores_are_nanochats(path, name):
    case = named_cases(path)[name]
    task = shuffled(task_of(name, path), None)
    assert list(task.items) == case["data_after_shuffle"]
    scores = score_items(
        task, stubs(path)[case["model"]], encode, longest=case["max_seq_len"]
    )
    for number, (item, got) in enumerate(zip(case["items"], scores, strict=True)):
        assert fewshot_numbers(task, number) == item["fewshot"]
        assert texts(task, number) == item["prompts"]
        rows = prompts(task, number, encode)
        assert [row.start for row in rows] == item["start"]
        assert [row.end for row in rows] == item["end"]
        assert got.correct == item["correct"]
        if "mean_losses" in item:
            np.testing.assert_allclose(got.losses, item["mean_losses"], rtol=2e-5)


@pytest.mark.parametrize("path", FILES)
def test_accuracies_are_centered_and_averaged(path):
    scores = {}
    for name, case in named_cases(path).items():
        result = score_core(
            [task_of(name, path)],
            stubs(path)[case["model"]],
            encode,
            longest=case["max_seq_len"],
        )
        [scores[name]] = result.tasks
        assert scores[name].accuracy == pytest.approx(case["accuracy"])
        assert scores[name].centered == pytest.approx(case["centered"], abs=1e-6)
    mean = np.mean([s.centered for s in scores.values()])
    assert mean == pytest.approx(json.loads(path.read_text())["core_metric"], abs=1e-6)


def test_a_token_that_reaches_over_the_join_is_scored_with_the_continuation():
    task = replace(task_of("lm_task"), fewshot=0)
    # The context ends in token 5, which the continuation turns into 6.
    [prompt] = prompts(task, 0, lambda _: [[0, 4, 5], [0, 4, 6]])
    assert (prompt.ids, prompt.start, prompt.end) == ([0, 4, 6], 2, 3)
    with pytest.raises(ValueError, match="adds no token to its context"):
        prompts(task, 0, lambda _: [[0, 4, 5], [0, 4]])


def bundle(folder, *, tasks=("one",)):
    folder.mkdir(exist_ok=True)
    (folder / "eval_data").mkdir(exist_ok=True)
    lines = ["icl_tasks:"]
    for task in tasks:
        lines += [
            f"- label: {task}",
            f"  dataset_uri: {task}.jsonl",
            "  num_fewshot: [0]",
            "  icl_task_type: language_modeling",
        ]
        item = json.dumps({"context": "a ", "continuation": "b"})
        (folder / "eval_data" / f"{task}.jsonl").write_text(item + "\n\n")
    (folder / "core.yaml").write_text("\n".join(lines))
    meta = "Eval Task,Random baseline\n" + "".join(f"{t},25\n" for t in tasks)
    (folder / "eval_meta_data.csv").write_text(meta)
    return folder


def test_a_bundle_is_read(tmp_path):
    [one, two] = read_bundle(bundle(tmp_path / "b", tasks=("one", "two")))
    assert (one.label, two.label, one.baseline, one.delimiter) == (
        "one",
        "two",
        25.0,
        " ",
    )
    assert one.items == ({"context": "a ", "continuation": "b"},)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda b: (b / "core.yaml").unlink(),
            "is not a CORE bundle: it has no .*core.yaml",
        ),
        (lambda b: (b / "core.yaml").write_text("- 1"), "is not a CORE bundle"),
        (
            lambda b: (b / "core.yaml").write_text("!!python/object/apply:os.abort []"),
            "is not a CORE bundle",
        ),
        (
            lambda b: (b / "eval_data" / "one.jsonl").unlink(),
            "an incomplete CORE bundle",
        ),
        (
            lambda b: (b / "eval_data" / "one.jsonl").write_text("{"),
            "not valid JSON",
        ),
        (lambda b: (b / "eval_data" / "one.jsonl").write_text(""), "holds no items"),
        (
            lambda b: (b / "eval_meta_data.csv").write_text(
                "Eval Task,Random baseline"
            ),
            "has no Random baseline for one",
        ),
    ],
)
def test_a_damaged_bundle_is_one_clear_sentence(tmp_path, spoil, message):
    """YAML's safe loader reads `core.yaml`."""
    folder = bundle(tmp_path / "b")
    spoil(folder)
    with pytest.raises(UserError, match=message):
        read_bundle(folder)


def test_a_prepared_file_is_a_task(tmp_path):
    item = {"query": "1 + 1 =", "choices": ["2", "3"], "gold": 0}
    task = {
        "label": "sums",
        "kind": "multiple_choice",
        "fewshot": 0,
        "delimiter": " ",
        "baseline": 50,
        "items": [item],
    }
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(task | {"label": name}))
    a, b = read_tasks(tmp_path)
    assert (a.label, b.label, a.items, a.baseline) == ("a", "b", (item,), 50.0)
    assert read_tasks(tmp_path / "a.json") == (a,)
    for change, message in [
        ({"kind": "essay"}, "type must be one of multiple_choice, schema, .*'essay'"),
        ({"items": []}, "a.json holds no items"),
        ({"items": [{"query": ""}]}, "item 0 lacks choices, gold, which a multiple"),
        ({"baseline": "half"}, "a.json is not a CORE task: .*half"),
        ({"baseline": float("nan")}, "baseline must be an accuracy"),
        ({"fewshot": 1e9}, "fewshot must be 0 to 1000"),
        ({"fewshot": None}, "fewshot must be 0 to 1000"),
        ({"delimiter": 7}, "delimiter must be a string"),
        *[
            ({"items": [item, item | {"gold": gold}]}, "item 1: gold must be 0 to 1")
            for gold in (9, 2, -1, None, "0", 0.0, True)
        ],
        ({"items": [item | {"query": 5}]}, "item 0: query must be a string, got 5"),
        ({"items": [item | {"choices": "ab"}]}, "item 0: choices must be a list of st"),
        ({"items": [item | {"choices": ["a", 1]}]}, "item 0: choices must be strings"),
        ({"items": [item | {"choices": []}]}, "item 0: choices must be a list of stri"),
        (
            {
                "kind": "schema",
                "items": [{"context_options": ["a"], "continuation": "b", "gold": 1}],
            },
            "item 0: gold must be 0 to 0, the place of one of context_options, got 1",
        ),
        (
            {
                "kind": "language_modeling",
                "items": [{"context": "a", "continuation": None}],
            },
            "item 0: continuation must be a string, got None",
        ),
    ]:
        (tmp_path / "a.json").write_text(json.dumps(task | {"label": "a"} | change))
        with pytest.raises(UserError, match=message):
            read_tasks(tmp_path)


def test_too_few_items_for_the_examples_are_told():
    task = task_of("mc_task")
    with pytest.raises(UserError, match="shows 2 examples .* has only 2 items"):
        score_core([task], lambda pairs: [], encode, limit=2)
