"""`recurjax card` and `recurjax push`, against a Hub on loopback."""

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess

import jax
import numpy as np
import pytest
from huggingface_hub import ModelCard

from recurjax.convert.card import _hub_datasets
from recurjax.convert.hub import from_hub
from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.config import (
    Bytes,
    DataConfig,
    EmbeddedText,
    Mixture,
    Parquet,
    Part,
)
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.evaluation.rows import Row, append_rows
from recurjax.training.run import load_run
from tests.cli.commands import assert_refused, recurjax
from tests.fake_hub import running_hub
from tests.torch_python import PYTHON
from tests.variants.rat import switches as rat

# huggingface_hub uploads by an argument that its own HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>'")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with running_hub(monkeypatch, tmp_path) as hub:
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


def push(run, *options):
    words = ("push", run, "me/tiny", "--license", "mit", "--no-check", *options)
    return recurjax(*words)


def same_parameters(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def content(hub, branch="main"):
    repository = hub.repositories["me/tiny"]
    return repository.commits[repository.branches[branch]]


def test_what_was_pushed_comes_back_bit_for_bit(hub, finished):
    code, out, err = push(finished, "--private")
    assert code == 0 and f"{hub.url}/me/tiny/commit/" in out, err
    repository = hub.repositories["me/tiny"]
    assert repository.private and len(repository.commits) == 2  # made, and one commit
    assert {"README.md", "model.safetensors", "config.json"} <= set(content(hub))
    back, run = from_hub("me/tiny"), load_run(finished)
    same_parameters(back.model, run.model)
    assert back.step == run.step and back.experiment.model == run.experiment.model
    assert back.tokenizer.hash == run.tokenizer.hash


def test_a_push_to_a_branch_of_an_older_step(hub, finished):
    assert push(finished)[0] == 0
    assert push(finished, "--step", "9", "--revision", "early")[0] == 0
    assert from_hub("me/tiny@early").step == 9 and from_hub("me/tiny").step == 12
    # Weights of another layout would be read instead of these.
    repository = hub.repositories["me/tiny"]
    shards = {
        "model.safetensors.index.json": b"{}",
        "model-00001-of-00001.safetensors": b"",
        "notes.txt": b"stays",
    }
    repository.commit({**content(hub), **shards})
    # The weights' bytes are there: what is sent again is no new object.
    assert push(finished)[0] == 0
    assert content(hub)["notes.txt"] == b"stays"
    assert not set(shards) - {"notes.txt"} & set(content(hub))


@pytest.mark.parametrize(
    "failing", ["PUT /lfs/", "POST .*/commit/", "POST .*preupload"]
)
def test_a_broken_push_leaves_nothing_behind(hub, finished, failing):
    hub.failing = failing
    assert_refused(push(finished), "me/tiny: the Hub at .* cannot be used: ")
    assert "me/tiny" not in hub.repositories
    hub.failing = None
    assert push(finished)[0] == 0
    before = content(hub)
    hub.failing = failing
    step = ("--step", "9")
    assert_refused(push(finished, *step), "me/tiny: the Hub at")
    assert_refused(
        push(finished, *step, "--revision", "new"), "me/tiny@new: the Hub at"
    )
    assert content(hub) == before
    assert list(hub.repositories["me/tiny"].branches) == ["main"]


def test_a_dry_run_sends_nothing(hub, finished, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    code, out, err = push(finished, "--dry-run")
    assert code == 0 and "README.md" in out and "nothing was sent" in out, err
    assert hub.requests == []


def test_what_cannot_be_pushed_is_one_sentence(hub, finished, tmp_path, monkeypatch):
    assert_refused(push(tmp_path / "nowhere"), "no run directory")
    words = ("push", finished, "me/tiny")
    assert_refused(recurjax(*words), "--license")
    assert_refused(
        recurjax(*words, "--license", "My own"),
        "--license must be a name .* got 'My own'",
    )
    words = ("push", finished, "tiny", "--license", "mit")
    assert_refused(recurjax(*words), "'tiny' is not a repository")
    assert push(finished)[0] == 0
    assert_refused(push(finished, "--private"), "me/tiny exists and is public")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert_refused(push(finished), "me/tiny: the Hub refuses the token")
    monkeypatch.delenv("HF_TOKEN")
    assert_refused(
        push(finished), "pushing needs a token with write permission: set HF_TOKEN"
    )


def test_a_card_says_what_the_run_knows(finished, tmp_path):
    append_rows(
        finished,
        [
            Row(step=12, task="arc", metric="accuracy", value=0.25, n=8, limit=8),
            Row(step=12, task="arc", metric="accuracy", value=0.5, n=8, limit=8),
            Row(step=9, task="arc", metric="accuracy", value=0.75, n=8),
        ],
    )
    words = ("card", finished, "--license", "mit", "--repository", "me/tiny")
    code, text, err = recurjax(*words)
    assert code == 0, err
    # As the Hub reads it.
    data = ModelCard(text).data
    assert (data.license, data.library_name) == ("mit", "recurjax")
    assert data.pipeline_tag == "text-generation"
    results = {r.dataset_name: r.metric_value for r in data.eval_results or []}
    assert results["arc"] == 0.5 and len(results) == 2
    for line in (
        "# tiny",
        "12 of 12",
        "![The losses by step](loss.png)",
        "| arc | accuracy | 0.5000 |",
        "was not compared with JAX",
        "@software{recurjax,",
    ):
        assert line in text, line
    # No path of this machine.
    assert str(finished) not in text and "/tmp" not in text
    file = tmp_path / "card.md"
    assert recurjax(*words, "--out", file)[0] == 0 and file.read_text() == text


def test_a_card_of_a_paper_and_of_imported_weights(tmp_path, quick_compilation):
    model = rat.build(dataclasses.replace(rat.SWITCHES["rat"], vocabulary=257))
    run = tmp_path / "run"
    experiment = new_experiment(run, model.config, length=12)
    write_run(run, model, experiment, ByteTokenizer())
    code, text, err = recurjax("card", run, "--license", "apache-2.0")
    assert code == 0, err
    assert "RAT: Bridging RNN Efficiency" in text and "@misc{rat," in text
    assert "no training is recorded" in text and "No evaluation" in text


def test_a_card_names_the_data_sets_of_the_hub():
    files = ("hf://datasets/o/b@main/data/*.parquet", "hf://datasets/o/a/x.parquet")
    parts = (
        Part(corpus=Parquet(patterns=files), weight=1.0, name="p"),
        Part(corpus=EmbeddedText(), weight=1.0, name="q"),
    )
    data = DataConfig(corpus=Mixture(parts=parts), tokenizer=Bytes())
    assert _hub_datasets(data) == ["o/a", "o/b"]
    alone = dataclasses.replace(data, corpus=Parquet(patterns=files[1:]))
    assert _hub_datasets(alone) == ["o/a"]


def snippets(hub):
    """Returns the examples of the pushed card, in order."""
    card = content(hub)["README.md"].decode()
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


def test_the_example_of_a_card_in_jax_runs(hub, finished):
    assert push(finished)[0] == 0
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(snippets(hub)[0], {})
    assert out.getvalue().strip()


@pytest.mark.torch("transformers")
@pytest.mark.slow
def test_the_examples_of_a_card_in_torch_run(hub, finished, tmp_path):
    words = ("push", finished, "me/tiny", "--license", "mit", "--torch-python", PYTHON)
    code, _, err = recurjax(*words)
    assert code == 0, err
    card = content(hub)["README.md"].decode()
    assert "greedy tokens are the same in every row" in card
    parity = json.loads(content(hub)["parity.json"])
    assert parity["measured"]
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    for code in snippets(hub)[1:]:
        done = subprocess.run(
            [PYTHON, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
