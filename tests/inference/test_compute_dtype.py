"""Weights held in the dtype of the products: the same bits for half the reading."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import target
from recurjax.inference.compute_dtype import in_compute_dtype, multiplied_shapes
from recurjax.inference.engine.slots import SequenceWise, empty_slots
from recurjax.layers.attention.key_value_cache import (
    empty_key_value_cache,
    read_layer,
    write,
)
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.position import LearnedPositions
from recurjax.layers.stack import scan_layers
from recurjax.model import Decoder
from recurjax.parameters import parameter_name
from recurjax.types import Cache, Tokens
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
    MemoryConfig,
)
from recurjax.variants.rat import RatConfig, RatMixerConfig, ReversedRatMixerConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from tests.compiling import QUICK_COMPILE
from tests.inference.conftest import STACK, build

SMALL = {"layers": 2, "width": 16, "mlp": MlpConfig(width=32)}
HEADS = {"heads": 2, "key_heads": 2, "head_width": 8}
STACKS = {
    "transformer": replace(
        STACK,
        windows=(3, None),
        attention=replace(
            STACK.attention, position=LearnedPositions(length=16), qkv_bias=True
        ),
    ),
    "recurrent_transformer": RecurrentTransformerConfig(**SMALL, **HEADS),
    "rat": RatConfig(
        **SMALL,
        pattern=(
            RatMixerConfig(heads=2, head_width=8, chunk=2, groups=1),
            ReversedRatMixerConfig(
                heads=2, head_width=8, chunk=2, groups=1, gate_horizon=8
            ),
        ),
    ),
    "latent_recurrent_transformer": LatentRecurrentTransformerConfig(
        layers=2,
        width=16,
        heads=2,
        key_heads=2,
        head_width=8,
        mlp_width=32,
        vocabulary=257,
        length=16,
        value_gate_channels=0,
        input_mixing="dense",
        memory=MemoryConfig(sources=(1, 2)),
    ),
}


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def decode_step(model: Decoder, ids: jax.Array, cache: Cache):
    return model(Tokens(ids), cache)


def read(model: Decoder, cache_dtype: str = "bfloat16"):
    """Returns the logits after each of two tokens of two rows."""
    cache = model.init_cache(2, 16, cache_dtype)
    first, cache = decode_step(model, jnp.asarray([[1], [2]]), cache)
    then, _ = decode_step(model, jnp.asarray([[3], [4]]), cache)
    return first, then


@pytest.mark.parametrize("name", STACKS)
def test_nothing_computed_changes_by_a_bit(name):
    model = build(stack=STACKS[name], dtype="bfloat16")
    narrow = in_compute_dtype(model)
    expected = read(model)
    chex.assert_trees_all_equal(read(narrow), expected)
    # The cache of a decode on CPU: the same values, held wide.
    chex.assert_trees_all_equal(read(narrow, "float32"), expected)
    dtypes = {
        parameter_name(path).rpartition(".")[2][:2]: leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path(narrow)
    }
    assert dtypes.pop("w_") == jnp.bfloat16
    assert set(dtypes.values()) == {jnp.dtype("float32")}


def test_a_float32_model_stays_as_it_is(model):
    chex.assert_trees_all_equal_dtypes(in_compute_dtype(model), model)


def test_a_tpu_s_projections_lie_with_their_inputs_last():
    model = build(stack=STACKS["latent_recurrent_transformer"], dtype="bfloat16")
    narrow = in_compute_dtype(model)
    with target.as_if(target.Target(platform="tpu", kind="TPU v5 lite")):
        laid = in_compute_dtype(model)
        again = in_compute_dtype(laid)
        shapes = multiplied_shapes(model)
    chex.assert_trees_all_equal(laid, narrow)
    chex.assert_trees_all_equal(read(laid), read(narrow))
    orders = {}
    named = jax.tree_util.tree_leaves_with_path(laid)
    for (path, leaf), wanted in zip(named, jax.tree.leaves(shapes), strict=True):
        order = leaf.format.layout.major_to_minor
        orders[parameter_name(path)] = order
        planned = wanted.format.layout
        assert planned is None or planned.major_to_minor == order
        assert (wanted.shape, wanted.dtype) == (leaf.shape, leaf.dtype)
    assert orders["stack.blocks.0.w_k"] == (0, 2, 3, 1)
    assert orders["stack.memory.w_v"] == (1, 2, 0)
    assert orders["stack.blocks.0.w_out"] == (0, 1, 2, 3)
    # Arrays in this layout are passed on, not copied.
    assert again.stack.blocks[0].w_k[...] is laid.stack.blocks[0].w_k[...]


@pytest.mark.parametrize("platform, dtype", [("cpu", "float32"), ("gpu", "bfloat16")])
def test_a_cache_is_narrow_where_the_device_is_not_slower_for_it(platform, dtype):
    slots = partial(empty_slots, strategy=SequenceWise(), rows=1, length=16)
    with target.as_if(target.Target(platform=platform, kind="")):
        state = jax.eval_shape(slots, build(dtype="bfloat16"))
    assert state.cache.groups[0].keys.dtype == dtype


def scratch_of(compiled) -> int:
    """Returns the bytes that a program takes on top of its arguments and results."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def layers_of(weights, *, cached: bool):
    def body(x, weight):
        return jnp.tanh(x @ weight), None

    x = jnp.ones((1, 4), weights.dtype)
    return scan_layers(body, x, weights, remat="nothing", unroll=1, cached=cached)[
        0
    ].sum()


def test_stacks_scanned_as_bits_are_the_stacks():
    weights = jax.random.normal(jax.random.key(0), (3, 4, 4), jnp.bfloat16)
    as_bits = jax.make_jaxpr(lambda w: layers_of(w, cached=True))(weights)
    plain = jax.make_jaxpr(lambda w: layers_of(w, cached=False))(weights)
    assert "u16[3,4,4]" in str(as_bits)
    assert "u16[3,4,4]" not in str(plain)
    assert layers_of(weights, cached=True) == layers_of(weights, cached=False)


of_old_jaxlib = pytest.mark.skipif(
    jax.version.__version_info__ >= (0, 12), reason="XLA of jaxlib 0.12 widens neither"
)


@of_old_jaxlib
def test_xla_for_cpus_widens_a_stack_that_is_not_scanned_as_bits():
    """The reason for `scan_layers` to scan bits: without it, that code can go."""
    weights = jax.ShapeDtypeStruct((16, 128, 128), jnp.bfloat16)

    def scratch_bytes(cached: bool) -> int:
        def run(weights):
            def body(x, weight):
                return jnp.tanh(x @ weight), None

            x = jnp.ones((1, 128), weights.dtype)
            options = {"remat": "nothing", "unroll": 1, "cached": cached}
            return scan_layers(body, x, weights, **options)[0]

        return scratch_of(jax.jit(run).lower(weights).compile())

    stack = weights.size * weights.dtype.itemsize
    assert scratch_bytes(cached=False) >= 2 * stack
    assert scratch_bytes(cached=True) < 1.5 * stack


@of_old_jaxlib
def test_xla_for_cpus_widens_a_bfloat16_cache_to_write_a_token():
    """The reason for `cache_dtype`: without it, that function can go."""

    def scratch_per_number(dtype) -> float:
        empty = partial(empty_key_value_cache, 12, 2, 512, 4, 32, dtype)
        cache = jax.eval_shape(empty)
        token = jax.ShapeDtypeStruct((2, 1, 4, 32), dtype)

        def step(cache, token):
            def body(cache, layer):
                cache = write(cache._replace(layer=layer), token, token, None)
                return cache, read_layer(cache.keys, layer).sum()

            return jax.lax.scan(body, cache, jnp.arange(12))

        compiled = jax.jit(step, donate_argnums=0).lower(cache, token).compile()
        return scratch_of(compiled) / (2 * cache.keys.size)

    # Bytes for each number of both caches: a copy in float32 is 4.
    assert scratch_per_number(jnp.bfloat16) >= 4
    assert scratch_per_number(jnp.float32) < 0.5


def test_a_gradient_that_would_be_lost_is_refused():
    weights = jnp.ones((3, 4, 4), jnp.bfloat16)
    jax.grad(lambda w: layers_of(w, cached=False))(weights)
    with pytest.raises(NotImplementedError, match="no gradient with bfloat16 weights"):
        jax.grad(lambda w: layers_of(w, cached=True))(weights)
