"""The laws of every stack for RecurFormer's switches, and its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.mamba import DT_LEAST, DT_MOST, Mamba, mamba_weights
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Alibi, LearnedPositions
from recurjax.model import Decoder
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.sharding import MeshConfig, batch_sharding, make_mesh, shardings
from recurjax.types import Tokens
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from tests.laws import B, StackLaws, T, draw_ids, pull_back, run
from tests.marks import slow_except
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.recurformer.switches import (
    MAMBA,
    SWITCHES,
    VOCABULARY,
    build,
    small,
)
from tests.variants.transformer import switches as transformer


class TestLaws(StackLaws):
    models = SWITCHES
    build = staticmethod(build)
    rare = frozenset({"head_norms_caps_and_a_window_layer", "learned_positions"})
    first = "ragged_groups"

    def documents(self, config):
        position = config.stack.transformer.attention.position
        return 0 if isinstance(position, LearnedPositions) else 1


def test_weights_start_as_the_mamba_authors_do():
    config, width = MambaConfig(conv=4, state=8, dt_rank=16, expand=2), 64
    mamba = Mamba(config, width, rngs=nnx.Rngs(0))
    inner = config.expand * width
    fan_in = {
        "w_u": width,
        "w_z": width,
        "w_conv": config.conv,
        "b_conv": config.conv,
        "w_x": inner,
        "w_dt": config.dt_rank,
        "w_back": inner,
    }
    weights = mamba.weights()
    for name, count in fan_in.items():
        values, bound = np.asarray(getattr(weights, name)), count**-0.5
        assert np.abs(values).max() <= bound
        # Four standard errors of a uniform distribution's mean and mean square.
        error = 4 * bound / values.size**0.5
        assert abs(values.mean()) < error / 3**0.5
        assert abs((values**2).mean() - bound**2 / 3) < error * bound * (4 / 45) ** 0.5
    steps = np.log(jax.nn.softplus(weights.b_dt))
    least, most = np.log(DT_LEAST), np.log(DT_MOST)
    assert least - 1e-3 < steps.min() and steps.max() < most + 1e-3
    assert (
        abs(steps.mean() - (least + most) / 2) < (most - least) / (3 * inner) ** 0.5 * 2
    )
    np.testing.assert_allclose(np.exp(weights.a_log), np.tile(range(1, 9), (inner, 1)))
    np.testing.assert_array_equal(weights.skip, 1)


@pytest.fixture(scope="module")
def ids():
    return draw_ids(VOCABULARY)


def unstacked(base: Decoder, config) -> Decoder:
    """The base's weights in layers of their own: nothing is replaced."""
    nested = to_nested_dict(base)
    [blocks] = nested["stack"].pop("blocks").values()
    layers = {
        str(layer): jax.tree.map(lambda leaf, layer=layer: leaf[layer], blocks)
        for layer in range(config.stack.layers)
    }
    nested["stack"]["layers"] = layers
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return from_nested_dict(like, nested)


OVER_ALL_HEADS = {"qk_norm": NormConfig(), "qk_norm_over": "full"}


@pytest.mark.parametrize("attention", [{}, OVER_ALL_HEADS], ids=["plain", "norms"])
def test_with_nothing_replaced_it_is_the_base_to_the_bit(ids, attention):
    base = transformer.small(key_heads=2, layers=3, attention=attention)
    config = small(((), (), ()), key_heads=2, attention=attention)
    assert config.stack.transformer == base.stack
    assert config.flops_per_token(T) == base.flops_per_token(T)
    model = transformer.build(base)
    plain = unstacked(model, config)
    for length in (0, T):
        want, _ = run(model, ids, model.init_cache(B, length))
        got, _ = run(plain, ids, plain.init_cache(B, length))
        np.testing.assert_array_equal(got, want)


def test_flops_of_a_replaced_head_are_those_of_its_weights_and_of_its_scan():
    """Counted by hand: 6 a weight, 27 a state of the scan, 12 a key seen."""
    config = small(((0, 1),), key_heads=2).stack
    base, mamba = config.transformer, config.mamba
    D, E, length = base.width, base.attention.head_width, 10
    heads = config.heads(0)
    # Two of four query heads are left, with the one key head that they read.
    assert (len(heads.remaining), heads.key_heads) == (2, (1,))
    projections = D * E * (2 + 1 + 2 + 4)
    channels = mamba.expand * 2 * E
    want = 6 * projections + 12 * 2 * E * length
    want += 6 * mamba_weights(mamba, 2 * E) + 27 * channels * mamba.state
    assert config.mixing_flops(0, length) == want


def test_heads_may_change_places_with_their_weights(ids):
    """Each key head's group moves as one; the replaced heads' Mamba does not change."""
    config = small(((0, 3),), key_heads=2)
    model = build(config)
    moved_config = small(((1, 2),), key_heads=2)
    nested = to_nested_dict(model)
    attention = nested["stack"]["layers"]["0"]["attention"]
    # Heads 0 1 | 2 3 become 1 0 | 3 2: remaining 1, 2 become 0, 3 in the same order.
    attention["w_out"] = attention["w_out"][jnp.array([1, 0, 3, 2])]
    like = jax.eval_shape(lambda: Decoder(moved_config, rngs=nnx.Rngs(0)))
    moved = from_nested_dict(like, nested)
    want, _ = run(model, ids, model.init_cache(B, 0))
    got, _ = run(moved, ids, moved.init_cache(B, 0))
    assert_values_close(got, want)


def test_gradients_reach_the_values_through_mamba(ids):
    """Where every head is replaced, nothing else reads them."""
    model = build(small(((0, 1, 2, 3),)))
    weights = np.random.default_rng(0).normal(size=(B, T, 8)).astype(np.float32)
    for_stack, _ = pull_back(model, ids, weights)
    gradients = to_nested_dict(for_stack)["layers"]["0"]["attention"]
    assert "w_q" not in gradients and "w_k" not in gradients
    assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("cut", [(1,) * T, (2, 1, T - 3), (3, T - 3)])
def test_a_cut_within_the_convolutions_reach_changes_nothing(ids, cut):
    model = build(SWITCHES["ragged_groups"])
    whole, _ = run(model, ids, model.init_cache(B, 0))
    cache, start, parts = model.init_cache(B, T), 0, []
    for piece in cut:
        logits, cache = run(model, ids[:, start : start + piece], cache)
        parts.append(logits)
        start += piece
    assert_values_close(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize(
    "shape", slow_except((), [(8, 1, 1), (2, 2, 2), (1, 2, 4)], slow=["(2, 2, 2)"])
)
def test_eight_devices_give_what_one_gives(shape):
    """Rows over data and fsdp, Mamba's channels and the heads over tensor."""
    model = build(SWITCHES["ragged_groups"])
    draw = np.random.default_rng(5)
    ids = draw.integers(VOCABULARY, size=(8, T)).astype(np.int32)
    weights = draw.normal(size=(8, T, VOCABULARY)).astype(np.float32)

    @jax.jit
    @jax.value_and_grad
    def pull(model, ids):
        logits, _ = model(Tokens(ids), model.init_cache(len(ids), 0))
        return jnp.mean(logits * weights)

    want, want_gradient = pull(model, jnp.asarray(ids))
    data, fsdp, tensor = shape
    config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    mesh = make_mesh(config, jax.devices()[:8])
    placed = jax.device_put(model, shardings(model, mesh))
    w_u = placed.stack.layers[0].attention.mamba.w_u[...]
    assert w_u.addressable_shards[0].data.size * fsdp * tensor == w_u.size
    with jax.set_mesh(mesh):
        got, gradient = pull(placed, jax.device_put(ids, batch_sharding(mesh)))
    assert_values_close(got, want)
    assert_gradients_close(to_nested_dict(gradient), to_nested_dict(want_gradient))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "block"])
def test_rematerialization_changes_nothing(ids, remat):
    config = SWITCHES["ragged_groups"]
    base = dataclasses.replace(config.stack.transformer, remat=remat)
    again = dataclasses.replace(
        config, stack=dataclasses.replace(config.stack, transformer=base)
    )
    model = build(config)
    leaves, other = jax.tree.leaves(model), build(again)
    other = jax.tree.unflatten(jax.tree.structure(other), leaves)
    weights = np.ones((B, T, 8), np.float32)
    want, got = (pull_back(m, ids, weights) for m in (model, other))
    assert_gradients_close(jax.tree.leaves(got), jax.tree.leaves(want))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: small(((0,),), heads=2, key_heads=2, attention={"position": Alibi()}),
         "ALiBi"),
        (lambda: small(((0,),), windows=(3,)), "layer 0 has a window"),
        (lambda: small(((4,),)), "must be from 0 to 3"),
        (lambda: small(((1, 1),)), "each once"),
        (lambda: small(((1, 0),)), "ascending"),
        (lambda: RecurFormerConfig(
            transformer=transformer.small(layers=2).stack, replaced=((),), mamba=MAMBA),
         "each of 2 layers, got 1"),
        (lambda: MambaConfig(conv=0), r"MambaConfig\.conv: must be >= 1, got 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_replaced_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_norms_over_all_heads_are_refused_where_some_go():
    with pytest.raises(ValueError, match="qk_norm over all heads cannot"):
        small(((0,),), attention=OVER_ALL_HEADS)
