"""What a user can get wrong: one clear sentence, exit code 2, nothing left behind."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file

from recurjax.convert import imported_run
from recurjax.convert.formats.safetensors_files import open_directory
from recurjax.errors import UserError, first_few
from tests.cli.commands import assert_refused, recurjax
from tests.convert.hf_directories import LLAMA, copy_of, rewrite

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def directory(tmp_path):
    return copy_of(LLAMA, tmp_path / "hf", tokens=131)


def refused(directory, pattern, *words):
    folder = directory.parent if directory.is_dir() else directory.parent.parent
    folder = directory.parent if not directory.exists() else folder
    out = folder / "out"
    answer = recurjax("convert", "from-hf", directory, out, "--no-check", *words)
    assert_refused(answer, pattern)
    left = {path.name for path in folder.iterdir()}
    assert left <= {"hf", "other"}, left


def test_not_a_checkpoint_directory(directory):
    refused(directory.parent / "nowhere", "there is no checkpoint at")
    refused(directory / "config.json", "is not a checkpoint directory")
    (directory / "config.json").unlink()
    refused(directory, "it has no config.json")


def test_weights_that_are_missing_or_pickled(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, "neither model.safetensors nor .* is a pickle, .* never read")


def test_a_config_that_is_not_json(directory):
    (directory / "config.json").write_text("{")
    refused(directory, "config.json is not valid JSON")


def test_a_truncated_file(directory):
    """The header of a safetensors file is checked against the size of the file."""
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(
        directory, "model.safetensors is not a complete safetensors file: .*cut off"
    )
    file.write_bytes(b"\x00" * 4)
    refused(directory, "model.safetensors is not a complete safetensors file")


def change_header(file, change):
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_a_header_that_lies_about_offsets(directory):
    def overlap(header):
        header[UP]["data_offsets"][0] -= 64

    change_header(directory / "model.safetensors", overlap)
    refused(directory, "is not a complete safetensors file: .*invalid offset")


def test_a_header_that_lies_about_shapes(directory):
    def widen(header):
        header[UP]["shape"][0] += 1

    change_header(directory / "model.safetensors", widen)
    refused(directory, "model.safetensors is not a complete safetensors file")


def test_tensors_that_do_not_fit_are_named(directory):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(48, np.float32)
        tensors[UP] = np.zeros((3, 4), np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)
        return tensors

    rewrite(directory, change)
    refused(
        directory,
        r"model.norm.weight is missing; .*lm_head.weight has dtype I32, not one of .*"
        r"q_proj.bias is not a tensor of this model",
    )
    refused(directory, r"up_proj.weight has shape \(3, 4\), not \(112, 48\)")


def test_many_tensors_that_do_not_fit_are_counted(directory):
    more = {f"model.extra.{n:03}": np.zeros(1, np.float32) for n in range(300)}
    rewrite(directory, lambda tensors: {**tensors, **more})
    names = "; ".join(f"{name} is not a tensor of this model" for name in [*more][:6])
    refused(directory, f"does not fit its model: {names}; and 294 more$")
    assert first_few("abcdefg", separator=",") == "a,b,c,d,e,f,and 1 more"
    assert first_few("abcdef", separator=",") == "a,b,c,d,e,f"


def test_shards_that_are_missing_or_do_not_agree(directory):
    tensors = load_file(directory / "model.safetensors")
    index = directory / "model.safetensors.index.json"
    homes = dict.fromkeys(tensors, "model.safetensors")
    index.write_text(json.dumps({"weight_map": homes | {"more": "b.safetensors"}}))
    refused(directory, "lacks the shards b.safetensors")
    index.write_text(json.dumps({"weight_map": homes | {"m": "model.safetensors"}}))
    refused(directory, "do not name the same tensors: m")
    index.write_text("[]")
    refused(directory, "the index of shards .* must hold a JSON object")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", 7])
def test_shards_outside_the_folder_are_not_opened(directory, name):
    index = directory / "model.safetensors.index.json"
    (directory.parent / "secret.safetensors").write_bytes(b"")
    index.write_text(json.dumps({"weight_map": {UP: name}}))
    with pytest.raises(UserError, match="must be the plain name of a file"):
        open_directory(directory)


def test_tokenizers_that_are_missing_or_too_large(directory, tmp_path):
    other = copy_of(LLAMA, tmp_path / "other", tokens=132)
    refused(directory, "has 132 tokens and .* only 131", "--tokenizer", other)
    (directory / "tokenizer.json").unlink()
    refused(directory, "has no tokenizer.json: name a file with --tokenizer")


def test_an_output_that_exists(directory, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    assert_refused(recurjax("convert", "from-hf", directory, out), "exists already")
    assert (out / "precious").read_text() == "kept"


@pytest.mark.parametrize("stage", ["checkpoint", "tokenizer"])
def test_a_full_disk(directory, monkeypatch, stage):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if stage == "checkpoint":
        monkeypatch.setattr(imported_run.Checkpoints, "save", full)
    else:
        monkeypatch.setattr(imported_run.RunDirectory, "claim", full)
    refused(directory, "could not be written: No space left on device")


def test_unknown_commands_and_ids(directory, tmp_path):
    assert_refused(recurjax("convert", "from-where"), "has no command 'from-where'")
    ids = tmp_path / "other"
    ids.write_text("no numbers")
    answer = recurjax("convert", "from-hf", directory, tmp_path / "out", "--ids", ids)
    assert_refused(answer, "is not a .npy file of numbers")
