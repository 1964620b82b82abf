"""The stack: order of layers, recomputation, costs, and what it refuses."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.position import LearnedPositions, Rope
from recurjax.parameters import to_nested_dict
from recurjax.plan.flops import count_flops
from recurjax.types import Tokens
from recurjax.variants.transformer import TransformerConfig, TransformerStack
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.transformer.switches import SWITCHES, build, small

IDS = np.random.default_rng(1).integers(17, size=(2, 7), dtype=np.int32)


@pytest.mark.parametrize(("layers", "unroll"), [(4, 1), (4, 2), (5, 1)])
def test_layers_run_in_order_with_their_own_windows(layers, unroll):
    """blocks[p] holds layers p, p + P, ...: the scan equals blocks one by one."""
    model = small(layers=layers, windows=(2, None), unroll=unroll)
    config, stack = model.stack, build(model).stack
    x = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)
    tokens = Tokens(IDS)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def one_by_one(blocks, x):
        cache = stack.init_cache(2, 0, x.dtype)
        for layer in range(config.layers):
            place, entry = config.place_of(layer)
            block = jax.tree.map(lambda leaf, i=entry: leaf[i], blocks[place])
            assert block.attention.window == config.windows[layer % 2]
            x, _ = block(x, cache.groups[place], tokens)
        return x

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def scanned(stack, x):
        return stack(x, stack.init_cache(2, 0, x.dtype), tokens)[0]

    assert_values_close(scanned(stack, x), one_by_one(stack.blocks, x))


def test_recomputation_changes_no_gradient():
    gradients = {}
    for remat in ("nothing", "dots", "block"):
        config = small(key_heads=2, windows=(2, None), remat=remat)
        model = build(config)

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        @jax.grad
        def loss(model):
            logits, _ = model(Tokens(IDS), model.init_cache(2, 0))
            return jnp.mean(logits**2)

        gradients[remat] = to_nested_dict(loss(model))
    assert_gradients_close(gradients["dots"], gradients["nothing"])
    assert_gradients_close(gradients["block"], gradients["nothing"])


def test_recomputation_keeps_less():
    """Bytes of residuals between the passes fall from nothing to dots to block."""
    kept = [residual_bytes(remat) for remat in ("nothing", "dots", "block")]
    assert kept[0] > 1.5 * kept[1] > 1.5 * 1.5 * kept[2], kept


def residual_bytes(remat: str) -> int:
    """Largest sum of arrays that one scan of the forward pass stacks up."""
    stack = build(small(layers=4, remat=remat)).stack
    x = jnp.zeros((2, 7, 8))

    def forward(stack, x):
        return stack(x, stack.init_cache(2, 0, x.dtype), Tokens(IDS))[0]

    both = jax.make_jaxpr(lambda stack, x: jax.vjp(forward, stack, x)[1](x))
    scans = [e for e in both(stack, x).eqns if e.primitive.name == "scan"]
    # What is stacked has one axis more outside the loop than in it; the carry does not.
    body = scans[0].params["jaxpr"].jaxpr.outvars
    pairs = zip(scans[0].outvars, body, strict=True)
    stacked = [out.aval for out, inner in pairs if out.aval.ndim > inner.aval.ndim]
    return sum(aval.size * aval.dtype.itemsize for aval in stacked)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_block_is_its_equation(parallel):
    switches = {"parallel_residual": parallel, "residual_scale": "inverse_sqrt_depth"}
    stacked = build(small(layers=4, **switches)).stack
    block = jax.tree.map(lambda leaf: leaf[0], stacked.blocks[0])
    x = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)
    tokens = Tokens(IDS)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def both(block, x):
        cache = stacked.init_cache(2, 0, x.dtype).groups[0]
        mixed, _ = block.attention(block.attention_norm(x), cache, tokens)
        source = x if parallel else x + 0.5 * mixed
        want = x + 0.5 * (mixed + block.mlp(block.mlp_norm(source)))
        return block(x, cache, tokens)[0], want

    assert_values_close(*both(block, x))


def test_the_layer_number_reaches_the_initialisation():
    init = InitConfig(std=0.02, output="layer")
    config = dataclasses.replace(
        small(windows=(3, None), layers=4, mlp=MlpConfig(width=256)).stack,
        init=init,
        width=128,
    )

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def make(key):
        return TransformerStack(config, rngs=nnx.Rngs(key))

    stack = make(jax.random.key(0))
    for layer in range(4):
        block = stack.blocks[layer % 2]
        for weight in (block.mlp.w_down, block.attention.w_out):
            weight = np.asarray(weight[...])[layer // 2]
            wanted = 0.02 / np.sqrt(2 * (layer + 1))
            assert np.std(weight) == pytest.approx(wanted, rel=0.1)
    drawn = np.stack([np.asarray(block.mlp.w_up[...]) for block in stack.blocks])
    assert len(np.unique(drawn)) > 0.99 * drawn.size  # no two layers share a draw


def test_flops_are_those_of_the_matrix_products():
    """Six a weight and token, and attention's two products, three times."""
    T = 7
    for switch in ("learned_capped_multi_query", "partial_rope_parallel_biases"):
        config = SWITCHES[switch]
        model = jax.eval_shape(lambda config=config: build(config))
        jaxpr = jax.make_jaxpr(lambda m: m(Tokens(IDS[:1]), m.init_cache(1, 0))[0])
        # Not on CPU, where rotation tables meet an identity besides (position.py).
        counted = 3 * count_flops(jaxpr(model), platform="tpu").products
        assert counted == T * config.flops_per_token(T)


def test_flops_by_hand():
    config = small(
        key_heads=2, layers=4, windows=(3, None), mlp=MlpConfig(kind="swiglu", width=12)
    ).stack
    projections = 8 * 16 + 2 * 8 * 8 + 16 * 8
    matrices = 4 * (projections + 3 * 8 * 12)
    seen = 2 * 4 + 2 * 100
    assert config.flops_per_token(100) == 6 * matrices + 12 * 16 * seen


def test_a_prompt_longer_than_the_cache_is_an_error():
    model = build(small())
    with pytest.raises(ValueError, match="7 tokens in one call exceed .* 6"):
        jax.eval_shape(lambda: model(Tokens(IDS), model.init_cache(2, 6)))


def test_learned_positions_end_with_their_table():
    model = build(small(attention={"position": LearnedPositions(length=6)}))
    with pytest.raises(
        ValueError, match="7 positions in one call exceed the table's 6"
    ):
        jax.eval_shape(lambda: model(Tokens(IDS), model.init_cache(2, 0)))
    with pytest.raises(ValueError, match="a cache of 9 tokens exceeds"):
        model.init_cache(2, 9)


def test_segments_are_for_training_only():
    model = build(small())
    with pytest.raises(NotImplementedError, match="segments"):
        tokens = Tokens(IDS, segments=np.zeros_like(IDS))
        jax.eval_shape(lambda: model(tokens, model.init_cache(2, 8)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": (1,) * 5}, "windows must have 1 to layers=4 entries"),
        ({"windows": ()}, "windows must have 1 to layers=4 entries"),
        ({"positions": (None,) * 5}, "positions must have 1 to layers=4 entries"),
        ({"positions": (Rope(fraction=0.8),)}, "even number of dimensions"),
        ({"windows": (-1,)}, r"TransformerConfig\.windows: must be >= 0, got \(-1,\)"),
        ({"layers": 0}, r"TransformerConfig\.layers: must be >= 1, got 0"),
    ],
)
def test_a_wrong_config_is_an_error_that_names_it(change, message):
    config = small(layers=4).stack
    assert isinstance(config, TransformerConfig)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)
