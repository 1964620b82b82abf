"""Imports and exports of a bucket are those of a disk; the bucket is in memory."""

import shutil

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from recurjax.files.storage import open_store
from recurjax.training.run import load_run
from tests.cli.commands import assert_refused, recurjax
from tests.convert.hf_directories import LLAMA, copy_of
from tests.training.bucket import bucket
from tests.training.compilation import quick_compilation

__all__ = ["bucket", "quick_compilation"]

STORE = "memory://bucket"


@pytest.fixture
def source(tmp_path):
    """A Hugging Face directory on disk and in the store."""
    here = copy_of(LLAMA, tmp_path / "llama", tokens=131)
    store = open_store(f"{STORE}/llama", write=True)
    for file in here.iterdir():
        store.send(file, file.name)
    return here


def convert(*words):
    code, out, err = recurjax("convert", *words, "--no-check")
    assert code == 0, (out, err)
    return out + err


def fetched(name, to):
    fsspec.filesystem("memory").get(f"/bucket/{name}", str(to), recursive=True)
    return to


def test_a_model_comes_from_a_bucket_goes_there_and_comes_back(
    source, tmp_path, quick_compilation
):
    convert("from-hf", source, tmp_path / "run")
    convert("to-torch", tmp_path / "run", tmp_path / "export")
    said = convert("from-hf", f"{STORE}/llama", f"{STORE}/runs/llama")
    assert f"sent to {STORE}/runs/llama" in said
    run = load_run(f"{STORE}/runs/llama")
    assert run.digest == load_run(tmp_path / "run").digest != ""
    convert("to-torch", f"{STORE}/runs/llama", f"{STORE}/export")
    got = load_file(fetched("export", tmp_path / "got") / "model.safetensors")
    want = load_file(tmp_path / "export" / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], want[name]) for name in want)
    convert("from-torch", f"{STORE}/export", f"{STORE}/runs/back")
    assert load_run(f"{STORE}/runs/back").digest == run.digest


def test_what_is_not_there_or_is_there_already_is_told_and_nothing_is_sent(
    source, tmp_path
):
    before = dict(fsspec.filesystem("memory").store)
    out = ("--no-check",)
    answer = recurjax("convert", "from-hf", f"{STORE}/none", tmp_path / "run", *out)
    assert_refused(answer, f"{STORE}/none: nothing lies there")
    answer = recurjax("convert", "from-hf", source, f"{STORE}/llama", *out)
    assert_refused(answer, f"{STORE}/llama exists already")
    answer = recurjax("convert", "from-hf", source, "https://host/x", *out)
    assert_refused(answer, "nothing can be written at https://")
    # A conversion that fails half way leaves nothing in the store.
    shutil.copy(source / "config.json", source / "model.safetensors")
    answer = recurjax("convert", "from-hf", source, f"{STORE}/runs/broken", *out)
    assert_refused(answer, "model.safetensors")
    assert dict(fsspec.filesystem("memory").store) == before
