"""Texts that do not fit a model's learned positions, at the command line."""

import dataclasses

import pytest

from recurjax.data.tokenizers import ByteTokenizer
from recurjax.layers.position import LearnedPositions
from recurjax.parameters import to_nested_dict
from recurjax.training.checkpoint import Checkpoints
from recurjax.training.run import RunDirectory
from tests.cli.commands import assert_refused, experiment_file, recurjax
from tests.training.tiny_experiment import config, drawn


@pytest.fixture
def run(quick_compilation, tmp_path):
    """A run directory of a model with 32 positions, as a training would leave it."""
    tiny = config()
    stack = tiny.model.stack
    attention = dataclasses.replace(
        stack.attention, position=LearnedPositions(length=32)
    )
    stack = dataclasses.replace(stack, attention=attention)
    model = dataclasses.replace(tiny.model, stack=stack)
    run = RunDirectory(tmp_path / "tiny")
    run.claim(dataclasses.replace(tiny, model=model), ByteTokenizer())
    checkpoints = Checkpoints(run.checkpoints)
    tree = {"model": to_nested_dict(drawn(model, scale=0.1))}
    checkpoints.save(1, tree, data_state={})
    checkpoints.close()
    return run.root


def test_a_prompt_longer_than_the_cache_is_refused(run):
    words = ["generate", run, "--temperature", 0, "--prompt"]
    answer = recurjax(*words, "a" * 29, "--max-new-tokens", 4)
    assert_refused(answer, "prompt 1 has 30 tokens .* 33 positions.* only 32")
    code, out, _ = recurjax(*words, "a" * 28, "--max-new-tokens", 4)
    assert code == 0 and out.startswith("a" * 28)


def test_rows_longer_than_the_positions_are_refused(run, tmp_path):
    answer = recurjax("evaluate", run, "--length", 33)
    assert_refused(answer, "--length 33 exceeds the model's 32 learned positions")
    body = (
        "from recurjax.experiment import read_experiment;"
        f"from pathlib import Path; return read_experiment(Path('{run}/config.json'))"
    )
    file = experiment_file(tmp_path, body)
    prompt = ["--evaluation.sample-prompts", "ab", "--evaluation.sample-tokens"]
    answer = recurjax("train", file, *prompt, 31, "--runs", tmp_path / "r")
    assert_refused(answer, "sample_tokens 31 after 'ab' .3 tokens. exceeds .* 32")
    answer = recurjax("train", file, "--training.length", 33, "--runs", tmp_path / "r")
    assert_refused(answer, "33.* 32 ")
    assert not (tmp_path / "r").exists()
