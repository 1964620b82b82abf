"""PEFT's adapter files in and out; the package itself where it is installed."""

import json
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from recurjax.training.run import load_run
from recurjax.types import Tokens
from tests.cli.commands import assert_refused, recurjax
from tests.convert.hf_directories import LLAMA, copy_of
from tests.torch_python import PYTHON

KEYS = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Hugging Face directory and its run."""
    root = tmp_path_factory.mktemp("peft")
    tokens = json.loads((LLAMA / "config.json").read_text())["vocab_size"]
    copy_of(LLAMA, root / "hf", tokens=tokens)
    answer = recurjax("convert", "from-hf", root / "hf", root / "base", "--no-check")
    assert answer[0] == 0, answer
    return root


def written(folder: Path, keys=None, change=lambda tensors: tensors) -> Path:
    """Writes adapters of q_proj as PEFT does."""
    config = json.loads((LLAMA / "config.json").read_text())
    D, H = config["hidden_size"], config["num_attention_heads"]
    E = config.get("head_dim") or D // H
    draw = np.random.default_rng(0).normal
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = draw(size=(2, D)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = draw(size=(H * E, 2)).astype(np.float32)
    folder.mkdir()
    save_file(change(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(KEYS | (keys or {})))
    return folder


def convert(base, folder, out):
    return recurjax("convert", "from-peft", folder, out, "--base", base / "base")


def test_a_round_trip_keeps_every_bit(base, tmp_path):
    folder = written(tmp_path / "peft")
    code, _, err = convert(base, folder, tmp_path / "run")
    assert code == 0, err
    code, _, err = recurjax("convert", "to-peft", tmp_path / "run", tmp_path / "back")
    assert code == 0, err
    tensors, back = (
        load_file(where / "adapter_model.safetensors")
        for where in (folder, tmp_path / "back")
    )
    assert tensors.keys() == back.keys()
    assert all(tensors[name].tobytes() == back[name].tobytes() for name in tensors)
    keys = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert keys | KEYS == keys


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_dora": True}, "not use_dora true"),
        ({"rank_pattern": {"q_proj": 4}}, "not rank_pattern"),
        ({"peft_type": "IA3"}, 'not peft_type "IA3"'),
        ({"init_lora_weights": "pissa"}, 'not init_lora_weights "pissa"'),
        ({"r": 0}, "r must be an integer"),
    ],
)
def test_what_recurjax_lacks_is_refused_by_name(base, keys, message, tmp_path):
    folder = written(tmp_path / "peft", keys)
    assert_refused(convert(base, folder, tmp_path / "run"), message)
    assert not (tmp_path / "run").exists()


def test_adapters_of_some_layers_are_refused(base, tmp_path):
    def first_layer(tensors):
        return {name: x for name, x in tensors.items() if ".layers.0." in name}

    folder = written(tmp_path / "peft", change=first_layer)
    answer = convert(base, folder, tmp_path / "run")
    assert_refused(answer, "it differs in base_model.model.model.layers.1")


@pytest.mark.torch("transformers", "peft")
@pytest.mark.slow
def test_adapters_of_peft_compute_the_same_and_go_back_to_the_bit(base, tmp_path):
    ids = np.random.default_rng(1).integers(20, size=(2, 9)).astype(np.int32)
    np.save(tmp_path / "ids.npy", ids)

    def reference(what: str, folder: Path) -> np.ndarray:
        script = Path(__file__).with_name("peft_reference.py")
        out = tmp_path / f"{what}.npy"
        words = [what, base / "hf", folder, tmp_path / "ids.npy", out]
        subprocess.run([PYTHON, script, *map(str, words)], check=True)
        return np.load(out)

    want = reference("make", tmp_path / "peft")
    code, _, err = convert(base, tmp_path / "peft", tmp_path / "run")
    assert code == 0, err
    model = load_run(tmp_path / "run").model
    logits, _ = jax.jit(lambda m, ids: m(Tokens(ids), m.init_cache(2, 0)))(model, ids)
    np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())
    code, _, err = recurjax("convert", "to-peft", tmp_path / "run", tmp_path / "back")
    assert code == 0, err
    np.testing.assert_array_equal(reference("read", tmp_path / "back"), want)
