"""`recurjax evaluate core RUN`: both scores of a latent memory, against a loop."""

import json

import jax
import numpy as np
import pytest

from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.types import Tokens
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from tests.cli.commands import assert_refused, recurjax
from tests.variants.latent_recurrent_transformer.switches import byte_model

BOS, EXAMPLES = 256, 12
QUERIES = [f"{n} and " for n in range(10, 10 + EXAMPLES)]
CHOICES = [[f"{letter}{n}" for letter in "abcd"] for n in range(10, 10 + EXAMPLES)]
"""All of one length, so that a loop over them needs no padding."""


def saved(folder, memory):
    model = byte_model(memory)
    experiment = new_experiment(folder, model.config, length=16)
    write_run(folder, model, experiment, ByteTokenizer())
    return model


@pytest.fixture(scope="module")
def latent(quick_compilation, tmp_path_factory):
    folder = tmp_path_factory.mktemp("core") / "latent"
    return folder, saved(folder, MemoryConfig(sources=(1,)))


def logits_of(model, ids, *, memory):
    if memory:
        return model(Tokens(ids), model.init_cache(len(ids), 0))[0]
    y, _ = model.stack.initial(model.embed(ids), Tokens(ids))
    return model.logits(model.final_norm(y))


def chosen(model, *, memory):
    """Each item's option of least mean loss of what differs, by hand."""
    read = jax.jit(lambda ids: logits_of(model, ids, memory=memory))
    matches = []
    for query, choices in zip(QUERIES, CHOICES, strict=True):
        ids = np.array([[BOS, *f"{query}{c}".encode()] for c in choices], np.int32)
        start, end = len(query) + 1, ids.shape[1]
        logp = np.asarray(jax.nn.log_softmax(read(ids)), np.float64)
        losses = [
            np.mean([-logp[row, t - 1, ids[row, t]] for t in range(start, end)])
            for row in range(len(ids))
        ]
        matches.append(int(np.argmin(losses)))
    return matches


def bundle(folder, gold):
    """A multiple-choice task without examples and a continuation task with one."""
    items = [
        {"query": query, "choices": choices, "gold": right}
        for query, choices, right in zip(QUERIES, CHOICES, gold, strict=True)
    ]
    further = [{"context": f"{n} then ", "continuation": "x"} for n in range(3)]
    (folder / "eval_data").mkdir(parents=True)
    for name, rows in {"pick": items, "go_on": further}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "eval_data" / f"{name}.jsonl").write_text(text)
    (folder / "core.yaml").write_text(
        "icl_tasks:\n"
        "- {label: pick, dataset_uri: pick.jsonl, num_fewshot: [0],\n"
        "   icl_task_type: multiple_choice, continuation_delimiter: ''}\n"
        "- {label: go_on, dataset_uri: go_on.jsonl, num_fewshot: [1],\n"
        "   icl_task_type: language_modeling}\n"
    )
    (folder / "eval_meta_data.csv").write_text(
        "Eval Task,Random baseline\npick,25\ngo_on,0\n"
    )
    return folder


@pytest.fixture(scope="module")
def choices(latent):
    """What the recurrence chooses, and what the pass without memory does."""
    return [chosen(latent[1], memory=memory) for memory in (True, False)]


@pytest.fixture(scope="module")
def tasks(choices, tmp_path_factory):
    """A bundle whose right options are those that the recurrence chooses."""
    return bundle(tmp_path_factory.mktemp("tasks") / "bundle", choices[0])


def evaluate(run, *options):
    code, out, err = recurjax("evaluate", "core", run, *options)
    assert code == 0, err
    return json.loads(out), err


@pytest.mark.slow
def test_a_latent_memory_has_its_score_and_the_one_without_it(
    latent, choices, tasks, tmp_path
):
    folder, _ = latent
    file = tmp_path / "core.json"
    got, err = evaluate(folder, tasks, "--json", file)
    assert json.loads(file.read_text()) == got
    assert (got["run"], got["step"], got["tasks"]) == (str(folder), 0, str(tasks))
    pick, go_on = got["core"]["tasks"]
    assert pick == {"label": "pick", "accuracy": 1.0, "centered": 1.0, "items": 12}
    assert (go_on["label"], go_on["items"]) == ("go_on", 3)
    agreed = np.mean(np.equal(*choices))
    assert agreed < 1, "the readings must differ"
    zero = got["core_zero_memory"]
    assert zero["tasks"][0]["accuracy"] == pytest.approx(agreed)
    centered = (agreed - 0.25) / 0.75
    assert zero["tasks"][0]["centered"] == pytest.approx(centered)
    last = zero["tasks"][1]["centered"]
    assert zero["core"] == pytest.approx((centered + last) / 2)
    assert "| task | items | core | centered | core_zero_memory | centered |" in err
    assert f"| pick | 12 | 1.0000 | 1.0000 | {agreed:.4f} | {centered:.4f} |" in err
    assert f"| CORE | | | {got['core']['core']:.4f} | | {zero['core']:.4f} |" in err


@pytest.mark.slow
def test_a_model_without_a_memory_has_one_score(tasks, tmp_path):
    saved(tmp_path / "plain", None)
    got, _ = evaluate(tmp_path / "plain", tasks, "--limit", 2)
    assert set(got) == {"run", "step", "tasks", "core"}
    assert [task["items"] for task in got["core"]["tasks"]] == [2, 2]


def test_mistakes_are_told_in_a_sentence(latent, tasks, tmp_path):
    run, _ = latent
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, pattern in [
        ((tmp_path / "none",), "no CORE bundle or task file at .*none"),
        ((empty,), "no .*core.yaml and no .*eval_meta_data.csv"),
        ((tasks, "--limit", 1), "go_on shows 1 examples .* only 1 "),
        ((tasks, "--limit", 0), "--limit: must be >= 1"),
        ((tasks, "--length", 9), "no option --length"),
    ]:
        assert_refused(recurjax("evaluate", "core", run, *words), pattern)
