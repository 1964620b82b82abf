"""The decoder: head and embedding, counts of known models, NNX in both modes."""

import dataclasses
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.errors import UserError
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import LearnedPositions, Rope
from recurjax.model import Decoder, ModelConfig, ParameterCount, count_parameters
from recurjax.types import Tokens
from recurjax.variants.transformer import TransformerConfig
from tests.compiling import QUICK_COMPILE
from tests.source_tree import ROOT
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.transformer.switches import SWITCHES, build, small

IDS = np.random.default_rng(1).integers(17, size=(2, 5), dtype=np.int32)
LAYER_NORM = NormConfig(kind="layer", eps=1e-5, bias=True)


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def run(model, ids):
    return model(Tokens(ids), model.init_cache(ids.shape[0], 0))[0]


def known(vocabulary, layers, width, heads, key_heads, head_width, mlp, **options):
    """A published model; the rest of its switches by name."""
    attention = {
        name: options.pop(name)
        for name in ("position", "qkv_bias", "out_bias")
        if name in options
    }
    norm = options.pop("norm", NormConfig())
    stack = TransformerConfig(
        layers=layers,
        width=width,
        attention=AttentionConfig(
            heads=heads, key_heads=key_heads, head_width=head_width, **attention
        ),
        mlp=mlp,
        norm=norm,
        parallel_residual=options.pop("parallel_residual", False),
    )
    return ModelConfig(vocabulary=vocabulary, stack=stack, final_norm=norm, **options)


KNOWN = {
    "GPT-2": (
        124_439_808,
        known(
            *(50257, 12, 768, 12, 12, 64),
            MlpConfig(kind="gelu_tanh", width=3072, bias=True),
            norm=LAYER_NORM,
            position=LearnedPositions(length=1024),
            qkv_bias=True,
            out_bias=True,
            tied_head=True,
        ),
    ),
    "TinyLlama 1.1B": (
        1_100_048_384,
        known(
            *(32000, 22, 2048, 32, 4, 64),
            MlpConfig(kind="swiglu", width=5632),
            norm=NormConfig(eps=1e-5),
        ),
    ),
    "Gemma 2B": (
        2_506_172_416,
        known(
            *(256000, 18, 2048, 8, 1, 256),
            MlpConfig(kind="geglu_tanh", width=16384),
            norm=NormConfig(one_plus=True),
            tied_head=True,
            embedding_scale="sqrt_width",
        ),
    ),
    "Pythia 1B": (
        1_011_781_632,
        known(
            *(50304, 16, 2048, 8, 8, 256),
            MlpConfig(kind="gelu", width=8192, bias=True),
            norm=LAYER_NORM,
            position=Rope(fraction=0.25),
            qkv_bias=True,
            out_bias=True,
            parallel_residual=True,
        ),
    ),
    "Qwen2 0.5B": (
        494_032_768,
        known(
            *(151936, 24, 896, 14, 2, 64),
            MlpConfig(kind="swiglu", width=4864),
            position=Rope(base=1e6),
            qkv_bias=True,
            tied_head=True,
        ),
    ),
}


def test_float64_without_64_bit_types_is_refused():
    assert not jax.config.jax_enable_x64
    config = dataclasses.replace(small(), dtype="float64")
    with pytest.raises(UserError, match="dtype float64 needs 64-bit types"):
        Decoder(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_have_their_published_number_of_parameters(name):
    number, config = KNOWN[name]
    count = count_parameters(config)
    assert count.total == number
    tables = 1 if config.tied_head else 2
    assert count.embedding == tables * config.vocabulary * config.stack.width
    assert count.outside_embedding == number - count.embedding


def test_the_count_is_of_what_is_built():
    for config in SWITCHES.values():
        leaves = jax.tree.leaves(build(config))
        assert count_parameters(config).total == sum(leaf.size for leaf in leaves)
    assert ParameterCount(total=5, embedding=2).outside_embedding == 3


def test_the_head_counts_in_the_flops():
    config = small(model={"pad_vocabulary_to": 8})
    assert config.padded_vocabulary == 24
    assert config.flops_per_token(9) == config.stack.flops_per_token(9) + 6 * 8 * 24


def test_a_tied_head_is_the_embedding():
    model = build(small(model={"tied_head": True}))
    assert model.w_head is None
    np.testing.assert_array_equal(model.head_weight(), model.w_embedding[...].T)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    want = x @ np.asarray(model.w_embedding[...]).T
    assert_values_close(model.logits(jnp.asarray(x)), want)


def test_the_embedding_is_scaled_and_its_tied_head_is_not():
    """Scaling the input by sqrt(8) by hand gives the same states."""
    scaled = build(small(model={"embedding_scale": "sqrt_width"}))
    plain = build(small())
    table = plain.w_embedding[...] * 8**0.5
    by_hand = jax.tree_util.tree_map_with_path(
        lambda path, leaf: table if "w_embedding" in str(path) else leaf, plain
    )
    assert_values_close(run(scaled, IDS), run(by_hand, IDS))


def test_logits_are_capped():
    free, capped = (build(small(model={"logit_soft_cap": c})) for c in (None, 0.5))
    logits = np.asarray(run(free, IDS), np.float64)
    assert np.abs(logits).max() > 1.0
    assert_values_close(run(capped, IDS), 0.5 * np.tanh(logits / 0.5))


def test_a_padded_vocabulary_changes_nothing_that_is_seen():
    """The same weights with rows and columns added."""
    plain, padded = (build(small(model={"pad_vocabulary_to": m})) for m in (1, 8))

    def grow(path, leaf, like):
        padding = [(0, n - m) for m, n in zip(leaf.shape, like.shape, strict=True)]
        return jnp.pad(leaf, padding, constant_values=9.0)

    leaves = jax.tree_util.tree_map_with_path(grow, plain, relabel(padded, plain))
    grown = jax.tree.unflatten(jax.tree.structure(padded), jax.tree.leaves(leaves))
    assert grown.head_weight().shape == (8, 24)
    assert_values_close(run(grown, IDS), run(plain, IDS))


def relabel(tree, like):
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def test_embedding_gradients_add_up_in_float32():
    """The same token 512 times: a bfloat16 sum of equals stops growing at 256."""
    gradients = {}
    for dtype in ("bfloat16", "float32"):
        config = small(layers=1, attention={"position": None}, model={"dtype": dtype})

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        @jax.grad
        def of_logits(model):
            ids = jnp.zeros((1, 512), jnp.int32)
            return jnp.sum(model(Tokens(ids), model.init_cache(1, 0))[0][..., 0])

        gradients[dtype] = of_logits(build(config)).w_embedding[...][0]
    assert_gradients_close(gradients["bfloat16"], gradients["float32"], "bfloat16")


@pytest.mark.parametrize("switch", SWITCHES)
def test_modules_keep_parameters_and_nothing_else(switch):
    """No keys, no caches; every Variable is a Param with a leaf of its own."""
    model = build(SWITCHES[switch])
    variables = [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
    assert {type(variable) for variable in variables} == {nnx.Param}
    leaves = jax.tree.leaves(model)
    assert len(variables) == len(leaves)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


GRADIENTS = """
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from recurjax.model import Decoder
from recurjax.parameters import from_nested_dict, parameter_name, to_nested_dict
from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE
from tests.variants.transformer.switches import build, small

jit = partial(jax.jit, compiler_options=QUICK_COMPILE)
config = small()
drawn = jit(lambda key: Decoder(config, rngs=nnx.Rngs(key)))(jax.random.key(0))
model = from_nested_dict(drawn, to_nested_dict(build(config)))
ids = np.arange(10, dtype=np.int32).reshape(2, 5)

@jit
@jax.value_and_grad
def loss(model):
    logits, _ = model(Tokens(ids), model.init_cache(2, 0))
    return jnp.mean(logits**2)

value, gradient = loss(model)
lines = [f"loss {float(value):.3e}"]
for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    size = float(np.linalg.norm(leaf))
    lines.append(f"{parameter_name(path)} {leaf.shape} {size:.3e}")
text = chr(10).join(sorted(lines))
"""


@pytest.mark.slow
def test_tree_mode_gives_what_graph_mode_gives():
    """In a child process: NNX reads its mode when it is imported."""
    environment = {
        **os.environ,
        "NNX_GRAPH_MODE": "false",
        "NNX_GRAPH_UPDATES": "false",
        "PYTHONPATH": str(ROOT),
    }
    child = subprocess.Popen(
        [sys.executable, "-c", GRADIENTS + "print(text)"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    here: dict = {}
    exec(GRADIENTS, here)
    output, errors = child.communicate()
    assert child.returncode == 0, errors
    assert "stack.blocks.0.attention.w_q (2, 8, 4, 4)" in output
    assert output.strip() == here["text"]
