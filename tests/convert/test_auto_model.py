"""Exports in transformers: AutoModel, caches, padding, saving, training, tokenizers.

Where peft is installed as well, a step of LoRA is taken too.
"""

import fcntl
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from recurjax.convert.torch.export import AUTO_MODULES, MODULE, from_torch, to_torch
from recurjax.inference.generate import generate_tokens
from recurjax.inference.sampling import SamplingConfig
from tests.convert.test_to_torch import (
    STACKS,
    assert_same_parameters,
    few_tokens,
    run_of,
)
from tests.torch_python import PYTHON
from tests.training.compilation import shared_by_workers

# With transformers 4.57 or newer.
pytestmark = pytest.mark.torch("transformers")

SCRIPT = Path(__file__).with_name("auto_model.py")
VARIANTS = (
    "transformer",
    "recurrent_transformer",
    "rat_baselines",
    "recurformer",
    "recursive_untied",
    "latent_averaged_sources_replacing",
)
"""A model of each variant; RAT's has all four mixers."""
SENTENCES = {
    "inputs_embeds": "inputs_embeds is not supported: .* pass input_ids",
    "generate_embeds": "inputs_embeds is not supported: .* pass input_ids",
    "position_ids": "position_ids is not supported: attention_mask defines",
    "mask": r"attention_mask must be \[B, T\] with 0 at pads, got the shape",
    "cache": "past_key_values must be this model's own cache, got a DynamicCache",
    "static": "cache_implementation='static' is not supported, because a",
    "assistant": "assisted generation is not supported with stateful models",
    "crop": "a recurrent state cannot be cropped to earlier tokens: copy the cache",
    "resize": "the vocabulary of an exported model is fixed",
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """The run and the export of each variant, and what the script says of them.

    Whoever comes first exports and asks, of all processes that run tests.
    """
    folder = shared_by_workers(tmp_path_factory) / "auto_model"
    folder.mkdir(exist_ok=True)
    runs = {name: run_of(STACKS[name], folder / name) for name in VARIANTS}
    said = folder / "out" / "answers.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases it
        if not said.exists():
            _ask(runs, folder)
    return runs, folder, json.loads(said.read_text())


def _ask(runs, folder) -> None:
    for name, run in runs.items():
        to_torch(run, folder / name, check=False)
        np.save(folder / name / "ids.npy", few_tokens(9))
    out = folder / "out"
    out.mkdir()
    directories = [str(folder / name) for name in runs]
    # Modules of other directories with the same hash must not be met.
    environment = os.environ | {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [PYTHON, "-W", "ignore", SCRIPT, out, *directories],
        check=True,
        env=environment,
    )


@pytest.fixture(params=VARIANTS)
def answers(request, exports):
    return exports[2][request.param]


def test_sixtyfour_greedy_tokens_are_those_of_our_generate(exports, quick_compilation):
    runs, folder, _ = exports
    for name, run in runs.items():
        ours = generate_tokens(
            run.model,
            list(few_tokens(9)),
            max_new_tokens=64,
            sampling=SamplingConfig(temperature=0.0),
        )
        with np.load(folder / "out" / f"{name}.npz") as theirs:
            np.testing.assert_array_equal(np.stack(ours.tokens), theirs["tokens"], name)


def test_pads_anywhere_change_nothing(answers):
    assert set(answers["ragged"]) == {"left", "right", "middle"}
    assert max(answers["ragged"].values()) <= 2e-5
    assert all(answers["generation"].values())


def test_generation_goes_on_from_chunks_and_from_a_used_cache(answers):
    assert answers["further"] == [True] * 4
    assert answers["beams"]


def test_labels_give_the_loss_of_the_next_token(answers):
    assert answers["loss"] <= 1e-6


def test_checkpointing_changes_no_gradient(answers):
    assert answers["gradients"] <= 1e-4


def test_what_transformers_saves_loads_bit_for_bit_there_and_here(exports):
    runs, folder, said = exports
    for name, run in runs.items():
        assert said[name]["saved"]
        saved = folder / "out" / name
        names = {path.name for path in saved.iterdir()}
        assert {MODULE, *AUTO_MODULES} <= names
        run.tokenizer.save(saved)
        back = from_torch(saved)
        assert_same_parameters(back.model, run.model)
        assert (back.step, back.experiment) == (run.step, run.experiment)


def test_bfloat16_weights_give_float32_logits(answers):
    want = ["torch.bfloat16", "torch.float32", True, [8, 17]]
    assert answers["half"] == want


def test_a_decode_step_is_one_graph(answers):
    graphs, difference = answers["compiled"]
    # Once for the first column, once for any column.
    assert graphs <= 3 and difference <= 2e-5


def test_what_is_not_supported_is_refused_in_a_sentence(answers):
    assert set(answers["refusals"]) == set(SENTENCES)
    for name, sentence in SENTENCES.items():
        assert re.search(sentence, answers["refusals"][name]), name


def test_a_step_of_lora_lowers_the_loss(answers):
    if answers["lora"] is None:
        pytest.skip("peft is not installed where RECURJAX_TORCH_PYTHON points")
    before, after = answers["lora"]
    assert after < before


def test_auto_tokenizer_reads_bytes(answers):
    batch, text = answers["text"]
    assert batch[0] == {
        "input_ids": list("h\u00e9llo\n".encode()),
        "attention_mask": [1] * 7,
    }
    assert batch[1]["input_ids"] == list(b"a  b")
    assert text == "h\u00e9llo\n"
