"""Pretrained models made recursive: the golden logits, and there and back again."""

import dataclasses
import re
import tracemalloc
from functools import partial

import jax
import numpy as np
import pytest

from recurjax.convert.hugging_face import from_hf
from recurjax.errors import UserError
from recurjax.layers.mlp import MlpConfig
from recurjax.sharding import MeshConfig, make_mesh, shardings
from recurjax.surgery.fewer_layers import with_evenly_kept_layers
from recurjax.surgery.named_parameters import parameters
from recurjax.surgery.relaxed_recursive import (
    evenly_kept,
    flat,
    kept_energy,
    maps_of,
    to_recursive,
    to_transformer,
)
from recurjax.types import Tokens
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from tests.compiling import QUICK_COMPILE
from tests.convert.hf_directories import CASES as BASES
from tests.convert.hf_directories import arrays
from tests.golden.cases import GOLDEN, OWN, golden_cases, load
from tests.marks import slow_except
from tests.tolerances import assert_values_close
from tests.training.compilation import quick_compilation
from tests.variants.transformer import switches as transformer

__all__ = ["quick_compilation"]

ABSOLUTE = 2e-5
WHOLE = 10**6
"""A rank that every matrix caps at its own."""

CASES = golden_cases("relaxed_recursive_transformers/[!e]*.npz")
KEY = re.compile(
    r"B(?P<loops>\d+)_(?P<sharing>cycle_rev|cycle|sequence)"
    r"_(?P<init>stepwise|average|lower)"
    r"(?:_svd(?P<rank>\d+|full_normstied))?(?P<exit>_exit1_logits)?"
)


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def logits_of(model, ids):
    return model(Tokens(ids), model.init_cache(len(ids), 0))[0]


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def logits_after_one_loop(model, ids):
    tokens, cache = Tokens(ids), model.init_cache(len(ids), 0)
    after, _ = model.stack.states(model.embed(ids), cache, tokens)
    return model.logits(model.final_norm(after[0]))


def recursive(model, **changes):
    return RelaxedRecursiveTransformerConfig(transformer=model.config.stack, **changes)


@pytest.mark.parametrize(
    "path", slow_except(("relaxed_recursive_transformers/llama",), CASES)
)
def test_converted_models_have_the_golden_logits(path):
    case, directory = load(path), GOLDEN / "hf" / path.stem
    model = from_hf(directory).model
    ids = np.asarray(arrays(directory)["input_ids"], np.int32)
    assert case
    for key, wanted in case.items():
        switches = KEY.fullmatch(key)
        assert switches is not None, f"{path.name}: {key} is not understood"
        loops, sharing, init, rank, cut = switches.group(
            "loops", "sharing", "init", "rank", "exit"
        )
        full = rank == "full_normstied"
        stack = recursive(
            model,
            loops=int(loops),
            sharing=sharing,
            rank=WHOLE if full else int(rank or 0),
        )
        fused = path.stem == "gpt_neox" and not full
        converted = to_recursive(model, stack, init=init, fused_qkv=fused)
        compute = logits_after_one_loop if cut else logits_of
        np.testing.assert_allclose(
            compute(converted, ids), wanted, rtol=0, atol=ABSOLUTE, err_msg=key
        )


@pytest.mark.parametrize("directory", BASES)
def test_full_rank_with_own_norms_is_the_pretrained_model(directory):
    io = arrays(directory)
    model = from_hf(directory).model
    ids = np.asarray(io["input_ids"], np.int32)
    if (model.config.stack.layers // 2) % len(model.config.stack.pattern):
        with pytest.raises(ValueError, match="must divide the block's"):
            recursive(model, loops=2, rank=WHOLE, tie_norms=False)
        return
    stack = recursive(model, loops=2, rank=WHOLE, tie_norms=False)
    converted = to_recursive(model, stack, init="average")
    np.testing.assert_allclose(
        logits_of(converted, ids), io["logits"], rtol=0, atol=ABSOLUTE
    )
    back = to_transformer(converted)
    assert back.config == model.config
    assert_values_close(parameters(back), parameters(model))


@pytest.mark.parametrize("adapters", ["svd", "zero"])
def test_where_a_layer_is_the_blocks_own_its_additions_start_as_nothing(adapters):
    model = from_hf(BASES[0].values[0]).model
    stack = recursive(model, loops=2, rank=3)
    converted = parameters(to_recursive(model, stack, init="lower", adapters=adapters))
    expands = {n: leaf for n, leaf in converted.items() if n.endswith("w_expand")}
    assert expands
    for name, leaf in expands.items():
        assert not leaf[0].any(), name
        assert leaf[1].any() == (adapters == "svd"), name
        assert converted[name.replace("expand", "reduce")].any(axis=(-2, -1)).all()


def test_only_the_models_own_transformer_is_made_recursive():
    model = from_hf(BASES[0].values[0]).model
    stack = recursive(model, loops=2)
    converted = to_recursive(model, stack, init="stepwise")
    with pytest.raises(
        UserError, match="only layers of a TransformerConfig or a RatConfig"
    ):
        to_recursive(converted, stack, init="stepwise")
    with pytest.raises(UserError, match="must be recursive"):
        to_transformer(model)


@pytest.fixture(scope="module")
def llama():
    return from_hf(OWN / "hf" / "llama").model


def norm_of(result):
    return parameters(result)["stack.blocks.0.attention_norm.scale"]


@pytest.mark.parametrize("init", ["stepwise", "average", "lower"])
def test_tied_norms_start_as_they_are_told(init, llama):
    stack = recursive(llama, loops=2)
    theirs = norm_of(llama)  # [6, D]; layer k of the block serves k and k + 3
    mean = (theirs[:3] + theirs[3:]) / 2
    rows = {"stepwise": [0, 2, 5], "average": [0, 1, 2], "lower": [0, 1, 2]}[init]
    for norms, want in (
        ("average", mean),
        ("choice", theirs[rows]),
        ("zero", np.zeros_like(mean)),
    ):
        converted = to_recursive(llama, stack, init=init, norms=norms)
        np.testing.assert_allclose(norm_of(converted), want, rtol=1e-6)
    plain = to_recursive(llama, stack, init=init)
    for name, leaf in parameters(plain).items():
        if "_norm." not in name:
            np.testing.assert_array_equal(leaf, parameters(converted)[name])
    untied = recursive(llama, loops=2, tie_norms=False)
    with pytest.raises(UserError, match="no loops share one"):
        to_recursive(llama, untied, init=init, norms="zero")


def test_a_random_block_is_drawn_and_the_rest_is_kept(llama, quick_compilation):
    stack = recursive(llama, loops=2, rank=2, tie_norms=False)
    first, second = (
        to_recursive(llama, stack, init="random", seed=seed) for seed in (0, 1)
    )
    result, other = parameters(first), parameters(second)
    theirs = parameters(llama)
    for name in ("w_embedding", "final_norm.scale"):
        np.testing.assert_array_equal(result[name], theirs[name])
    w_q = "stack.blocks.0.attention.w_q"
    assert np.abs(result[w_q] - other[w_q]).max() > 1e-3
    assert np.all(norm_of(first) == 1)


def test_layers_are_left_out_at_equal_steps_where_loops_do_not_divide(llama):
    assert evenly_kept(7, 6) == (0, 1, 2, 4, 5, 6)  # 2.4 down, 3.6 up
    assert evenly_kept(6, 4) == (0, 2, 3, 5)
    shorter = with_evenly_kept_layers(llama, 4)
    assert shorter.config.stack.layers == 4
    np.testing.assert_array_equal(norm_of(shorter), norm_of(llama)[[0, 2, 3, 5]])
    assert with_evenly_kept_layers(llama, 3) is llama
    with pytest.raises(UserError, match=r"1\.\.6, got 7"):
        with_evenly_kept_layers(llama, 7)


@pytest.mark.slow
def test_a_model_on_a_mesh_becomes_the_same_one_there(llama):
    stack = recursive(llama, loops=2, rank=3, tie_norms=False)
    want = to_recursive(llama, stack, init="average")
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    spread = jax.device_put(llama, shardings(llama, mesh))
    converted = to_recursive(spread, stack, init="average", mesh=mesh)
    back = to_transformer(converted, mesh=mesh)
    for model, alone in ((converted, want), (back, to_transformer(want))):
        places = jax.tree.leaves(shardings(model, mesh))
        for leaf, where in zip(jax.tree.leaves(model), places, strict=True):
            assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
        ours, theirs = parameters(model), parameters(alone)
        for name, leaf in theirs.items():
            np.testing.assert_array_equal(ours[name], leaf, err_msg=name)
    assert kept_energy(spread, converted) == kept_energy(llama, want)


@pytest.mark.parametrize("loops", [2, 3])
def test_additions_to_a_mean_are_the_best_of_their_rank(llama, loops):
    """Two uses of a mean share their singular vectors and lose nothing by it."""
    stack = recursive(llama, loops=loops, rank=3)
    converted = to_recursive(llama, stack, init="average")
    theirs = parameters(llama)
    # A square matrix, one that is wider than high, and one that is higher.
    for name in ("q", "up", "down"):
        inner = maps_of(llama)[0][name]
        weight = theirs[f"stack.blocks.0.{inner}"]
        layers = [flat(inner, layer) for layer in weight]
        for energy in kept_energy(llama, converted):
            if energy.name == name:
                uses = layers[energy.depth % (6 // loops) :: 6 // loops]
                residual = layers[energy.depth] - sum(uses) / loops
                singular = np.linalg.svd(residual, compute_uv=False) ** 2
                kept = singular[:3].sum() / singular.sum()
                assert energy.kept == pytest.approx(kept, abs=1e-5)


def test_beside_both_models_memory_holds_a_few_matrices():
    config = transformer.small(
        layers=12, heads=8, key_heads=8, head_width=16, mlp=MlpConfig(width=512)
    )
    stack = dataclasses.replace(config.stack, width=128)
    model = transformer.build(dataclasses.replace(config, stack=stack, vocabulary=4096))
    stack = recursive(model, loops=2, rank=16, tie_norms=False)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))

    def beside_both(convert, model):
        tracemalloc.start()
        recursive = convert(model)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # JAX's arrays are not traced, and what NumPy holds at the end is the new model.
        return recursive, (peak - kept) / size

    converted, peak = beside_both(
        partial(to_recursive, stack=stack, init="average"), model
    )
    assert peak < 0.3
    # All layers of a matrix are a fourth of so shallow a model.
    back, peak = beside_both(to_transformer, converted)
    assert peak < 0.4
    assert back.config == model.config
