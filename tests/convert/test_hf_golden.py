"""Tiny Hugging Face models: what transformers computed, for every directory.

`python -m tests.convert.test_hf_golden` prints the table of docs/design/conversion.md.
"""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.convert.hugging_face import from_hf
from recurjax.convert.hugging_face.families import FAMILIES
from recurjax.convert.hugging_face.names import hf_pieces, tied_tensors
from recurjax.convert.padding import from_left_padding, to_left_padding
from recurjax.convert.parity import layer_states
from recurjax.convert.torch.export import to_tensors
from recurjax.inference.generate import generate_tokens
from recurjax.inference.sampling import SamplingConfig
from recurjax.model import Decoder
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.training.objective import NextToken
from recurjax.types import IGNORED, Batch, Tokens
from tests.compiling import QUICK_COMPILE
from tests.convert.hf_directories import CASES, arrays
from tests.marks import slow_except

LOGITS_ABSOLUTE = 2e-5
GRADIENT = 1e-4
PROMPT = 8
FEW = ("hf/llama", "hf/gemma3", "hf/gpt_neox", "hf/gpt2")
few_families = pytest.mark.parametrize(
    "case", slow_except((), CASES, slow=FEW), indirect=True, scope="module"
)
"""For what the logits of all families leave little room to be wrong in."""


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def forward(model, ids):
    return model(Tokens(ids), model.init_cache(ids.shape[0], 0))[0]


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """Returns directory, arrays and the imported model."""
    return request.param, arrays(request.param), from_hf(request.param)


def test_logits_are_those_of_transformers(case):
    _, io, imported = case
    logits = forward(imported.model, ids_of(io["input_ids"]))
    np.testing.assert_allclose(logits, io["logits"], rtol=0, atol=LOGITS_ABSOLUTE)


@pytest.mark.slow
def test_hidden_states_are_those_of_transformers(case):
    _, io, imported = case
    states = layer_states(imported.model, io["input_ids"])
    np.testing.assert_allclose(
        states, io["hidden_states"], rtol=0, atol=LOGITS_ABSOLUTE
    )


def test_left_padded_rows_are_those_of_transformers(case):
    _, io, imported = case
    tokens = from_left_padding(io["input_ids"], io["leftpad_mask"])
    logits = forward(imported.model, tokens.ids)
    logits = to_left_padding(np.asarray(logits), np.asarray(tokens.lengths))
    real = io["leftpad_mask"] != 0
    assert (~real).any() and real[:, -1].all()
    np.testing.assert_allclose(
        logits[real], io["leftpad_logits"][real], rtol=0, atol=LOGITS_ABSOLUTE
    )


@pytest.mark.slow
def test_the_first_layers_cache_is_that_of_transformers(case):
    _, io, imported = case
    model, (B, T) = imported.model, io["input_ids"].shape
    if "key_cache_l0" not in io:
        pytest.skip("the case has windows, and no cache of all keys")

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def prefill(model, ids):
        return model(Tokens(ids), model.init_cache(B, T))

    logits, cache = prefill(model, ids_of(io["input_ids"]))
    np.testing.assert_allclose(logits, io["logits"], rtol=0, atol=LOGITS_ABSOLUTE)
    first = cache.groups[0]
    for ours, theirs in ((first.keys, "key"), (first.values, "value")):
        np.testing.assert_allclose(
            ours[0].swapaxes(1, 2),
            io[f"{theirs}_cache_l0"],
            rtol=0,
            atol=LOGITS_ABSOLUTE,
        )


def test_greedy_tokens_are_the_likeliest_at_each_place(case):
    _, io, imported = case
    greedy = io["greedy_ids"]
    padded = np.zeros(io["input_ids"].shape, np.int32)
    padded[:, : greedy.shape[1]] = greedy
    logits = forward(imported.model, jnp.asarray(padded))
    likeliest = np.asarray(logits).argmax(-1)[:, : greedy.shape[1] - 1]
    np.testing.assert_array_equal(likeliest[:, PROMPT - 1 :], greedy[:, PROMPT:])


@few_families
def test_generation_makes_the_same_tokens(case):
    _, io, imported = case
    greedy = io["greedy_ids"]
    generation = generate_tokens(
        imported.model,
        list(greedy[:, :PROMPT]),
        max_new_tokens=greedy.shape[1] - PROMPT,
        sampling=SamplingConfig(temperature=0.0),
    )
    np.testing.assert_array_equal(np.stack(generation.tokens), greedy[:, PROMPT:])


@few_families
def test_loss_and_gradient_norms_are_those_of_transformers(case):
    directory, io, imported = case
    pad = json.loads((directory / "config.json").read_text()).get("pad_token_id")
    model = untied(imported.model)
    ids = ids_of(io["input_ids"])
    batch = Batch(ids, jnp.roll(ids, -1, axis=1).at[:, -1].set(IGNORED))
    run = partial(jax.jit, compiler_options=QUICK_COMPILE)(
        jax.value_and_grad(lambda model: NextToken()(model, batch)[0])
    )
    loss, gradient = run(model)
    np.testing.assert_allclose(loss, io["loss"], rtol=1e-5)
    nested = to_nested_dict(gradient)
    if pad is not None:  # torch's embedding gives its padding row no gradient
        nested["w_embedding"] = nested["w_embedding"].at[pad].set(0)
    if imported.model.config.tied_head:
        nested["w_embedding"] += nested.pop("w_head").T
    gradient = from_nested_dict(imported.model, nested)
    pieces = hf_pieces(imported.architecture, imported.model.config)
    ours = {
        name: np.linalg.norm(array.astype(np.float64))
        for name, array in to_tensors(gradient, pieces).items()
    }
    theirs = {
        name.replace("/", ".").replace("lm_head", head_of(imported.architecture)): norm
        for name, norm in json.loads(
            (directory / "grad_norms.json").read_text()
        ).items()
    }
    assert set(ours) == set(theirs)
    largest = max(theirs.values())
    for name, norm in theirs.items():
        # Keys' biases have a gradient of exactly zero: softmax does not see them.
        scale = norm if norm > 1e-5 * largest else largest
        assert abs(ours[name] - norm) <= GRADIENT * scale, name


def untied(model):
    """Returns the same function with a head of its own."""
    if not model.config.tied_head:
        return model
    nested = to_nested_dict(model)
    nested["w_head"] = nested["w_embedding"].T
    config = dataclasses.replace(model.config, tied_head=False)
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return from_nested_dict(like, nested)


def head_of(architecture: str) -> str:
    return tied_tensors(FAMILIES[architecture])[1].removesuffix(".weight")


def ids_of(array: np.ndarray) -> jax.Array:
    return jnp.asarray(array, jnp.int32)


def print_table() -> None:
    print("| family | parameters | logits | left-padded | the same likeliest token |")
    print("|---|---|---|---|---|")
    for case in CASES:
        directory = case.values[0]
        io, model = arrays(directory), from_hf(directory).model
        logits = np.asarray(forward(model, ids_of(io["input_ids"])))
        tokens = from_left_padding(io["input_ids"], io["leftpad_mask"])
        padded = np.asarray(forward(model, tokens.ids))
        padded = to_left_padding(padded, np.asarray(tokens.lengths))
        real = io["leftpad_mask"] != 0
        far = np.abs(logits - io["logits"]).max()
        far_padded = np.abs(padded[real] - io["leftpad_logits"][real]).max()
        alike = (logits.argmax(-1) == io["logits"].argmax(-1)).mean()
        size = sum(leaf.size for leaf in jax.tree.leaves(model))
        cells = [directory.name, f"{size:,}", f"{far:.1e}", f"{far_padded:.1e}"]
        print("| " + " | ".join([*cells, f"{alike:.1%}"]) + " |", flush=True)


if __name__ == "__main__":
    print_table()
