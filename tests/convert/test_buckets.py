"""Imports and exports of a bucket are those of a disk; the bucket is in memory."""

import re
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from recurjax.cli.convert import command
from recurjax.convert.parity import Parity
from recurjax.errors import UserError
from recurjax.files.storage import Store, open_store
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
    assert_refused(answer, f"{STORE}/none: there is no such object or folder")
    answer = recurjax("convert", "from-hf", source, f"{STORE}/llama", *out)
    assert_refused(answer, f"{STORE}/llama exists already")
    answer = recurjax("convert", "from-hf", source, "https://host/x", *out)
    assert_refused(answer, "nothing can be written at https://")
    # A conversion that fails half way leaves nothing in the store.
    shutil.copy(source / "config.json", source / "model.safetensors")
    answer = recurjax("convert", "from-hf", source, f"{STORE}/runs/broken", *out)
    assert_refused(answer, "model.safetensors")
    assert dict(fsspec.filesystem("memory").store) == before


@pytest.mark.parametrize("agrees", [True, False])
def test_what_differs_from_its_source_is_not_sent_and_stays_here(
    source, tmp_path, monkeypatch, quick_compilation, agrees
):
    """With exit code 1 a bucket must not hold what the next command takes for good."""
    monkeypatch.setenv("RECURJAX_CACHE", str(tmp_path / "cache"))
    apart = 0.0 if agrees else 1.0
    result = Parity(
        against="torch 2",
        shape=(1, 8),
        max_abs_difference=apart,
        relative_difference=apart,
        kl=apart,
        top1_agreement=1.0,
        first_differing_layer=None,
        layer_differences=(),
        greedy_tokens=4,
        greedy_agreement=4,
        tolerance=1e-3,
    )
    monkeypatch.setattr(command, "compare_with_hf", lambda *_, **__: result)
    memory = fsspec.filesystem("memory")
    before = dict(memory.store)
    code, _, err = recurjax("convert", "from-hf", source, f"{STORE}/runs/llama")
    if agrees:
        assert code == 0 and f"sent to {STORE}/runs/llama" in err
        assert "/bucket/runs/llama/config.json" in memory.store
        return
    assert code == 1 and dict(memory.store) == before
    message = re.search(
        rf"nothing was sent to {STORE}/runs/llama: the output is in (\S+)", err
    )
    assert message is not None, err
    assert (Path(message[1]) / "config.json").is_file()


def test_half_of_what_was_sent_is_removed(source, tmp_path, monkeypatch):
    monkeypatch.setenv("RECURJAX_CACHE", str(tmp_path / "cache"))
    memory, sent, real = fsspec.filesystem("memory"), [], Store.send
    before = dict(memory.store)

    def send(store, file, name):
        sent.append(name)
        if len(sent) == 3:
            raise UserError("the network went away")
        real(store, file, name)

    monkeypatch.setattr(Store, "send", send)
    words = ("convert", "from-hf", source, f"{STORE}/runs/llama", "--no-check")
    assert_refused(recurjax(*words), "the network went away")
    assert len(sent) == 3 and dict(memory.store) == before
    assert recurjax(*words)[0] == 0


def test_options_stand_behind_the_places_where_one_is_a_url(source):
    words = ("convert", "from-hf", "--no-check", source, f"{STORE}/runs/llama")
    assert_refused(recurjax(*words), "SOURCE and OUT must come before")
