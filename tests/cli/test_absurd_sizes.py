"""Sizes that no machine has are refused in a sentence before memory is taken."""

import pytest

from recurjax.data.config import Bpe, DataConfig, EmbeddedText
from recurjax.errors import UserError
from tests.cli.commands import TINY, assert_refused, recurjax


@pytest.mark.parametrize(
    "option, value, pattern",
    [
        ("--training.batch", 10**9, "exceeds 2.28 tokens per step"),
        ("--training.batch", 10**12, "--training.batch: must be below 2.31"),
        ("--training.length", 10**12, "--training.length: must be below 2.31"),
        ("--data.prefetch", 10**8, "--data.prefetch: must be >= 0 and <= 1024"),
        ("--data.threads", 10**8, "--data.threads: must be >= 1 and <= 1024"),
        ("--training.steps", 10**12, "--training.steps: must be below 2.31"),
        (
            "--training.spikes.window",
            10**9,
            "--training.spikes.window: must be >= 2 and <= 65536, got 1000000000",
        ),
        (
            "--optimizer.learning-rate",
            "nan",
            "--optimizer.learning-rate: must be finite",
        ),
    ],
)
def test_training_refuses_it_and_leaves_nothing(option, value, pattern, tmp_path):
    answer = recurjax("train", TINY, "--runs", tmp_path / "runs", option, value)
    assert_refused(answer, pattern)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "options", [["--batch", 10**12], ["--length", 10**12], ["--batch", 10**8]]
)
def test_an_evaluation_refuses_it(options, finished):
    answer = recurjax("evaluate", finished, *options)
    assert_refused(answer, "exceeds 2.28 tokens per batch")


def test_a_generation_refuses_it(finished):
    words = ("generate", finished, "--prompt", "a", "--max-new-tokens")
    assert_refused(recurjax(*words, 10**12), "--max-new-tokens: must be below 2.31")
    assert_refused(recurjax(*words, 2**31 - 1), "fewer new tokens")


@pytest.mark.parametrize("size", [5_000_000_000, 2_000_000_000])
def test_a_tokenizer_refuses_it(size, tmp_path):
    with pytest.raises(
        UserError, match=rf"Bpe\.vocabulary: must be >= 257 and <= 2\^24, got {size}"
    ):
        DataConfig(corpus=EmbeddedText(), tokenizer=Bpe(vocabulary=size))
    words = ["--corpus", "embedded", "--out", tmp_path / "out"]
    words += ["--tokenizer", f"bpe:{size}"]
    assert_refused(
        recurjax("data", "prepare", *words),
        r"vocabulary: must be >= 257 and <= 2\^24, got",
    )
