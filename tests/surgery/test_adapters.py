"""Adapters of every variant: what they change, what they leave, what they become."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.parameters import parameter_name
from recurjax.sharding import MeshConfig, make_mesh, shardings
from recurjax.surgery.adapters import merged, with_adapters
from recurjax.training.config import ADAPTER_PARAMETERS, AdapterConfig, parse_adapters
from recurjax.training.step import trained_part, whole_model
from recurjax.types import Tokens
from tests.laws import B, draw_ids, in_pieces, quick, run
from tests.marks import slow_except
from tests.tolerances import assert_values_close
from tests.variants.latent_recurrent_transformer import switches as latent
from tests.variants.rat import switches as rat
from tests.variants.recurformer import switches as recurformer
from tests.variants.recurrent_transformer import switches as recurrent
from tests.variants.relaxed_recursive_transformer import switches as recursive
from tests.variants.transformer import switches as transformer

VARIANTS = {
    "transformer": (transformer, "rope_grouped_ring"),
    "recurrent_transformer": (recurrent, "the_paper"),
    "latent_recurrent_transformer": (latent, "shared"),
    "rat": (rat, "rat"),
    "mamba": (rat, "rat_beside_mamba"),
    "rt_in_a_pattern": (rat, "rat_beside_rt"),
    "relaxed_recursive_transformer": (recursive, "cycle, untied, rank 3, rings"),
    "recurformer": (recurformer, "ragged_groups"),
}
CONFIG = AdapterConfig(rank=2, alpha=3.0)


@cache
def base_of(variant):
    switches, name = VARIANTS[variant]
    build = getattr(switches, "build", transformer.build)
    return build(switches.SWITCHES[name])


@cache
def adapted(variant):
    """The model with adapters away from their start, drawn by numpy."""
    draw = np.random.default_rng(3).normal

    def drawn(path, leaf):
        if not parameter_name(path).endswith(("lora_a", "lora_b")):
            return leaf
        return jnp.asarray(0.3 * draw(size=leaf.shape), leaf.dtype)

    added = with_adapters(base_of(variant), CONFIG, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(drawn, added)


@quick
def gradient_of(trained, model, ids):
    def loss(trained):
        logits, _ = whole_model(trained, model)(Tokens(ids), model.init_cache(B, 0))
        return jnp.mean(jnp.square(logits))

    return jax.grad(loss)(trained)


@cache
def logits_of(variant):
    return plain_logits(adapted(variant))


def plain_logits(model):
    ids = draw_ids(model.config.vocabulary)
    return run(model, ids, model.init_cache(B, 0))[0]


EVERY = slow_except(
    ("transformer", "rat"), VARIANTS, slow=["latent_recurrent_transformer"]
)


@pytest.fixture(params=EVERY)
def variant(request):
    return request.param


def test_gradients_reach_only_adapters_and_all_of_them(variant):
    model = adapted(variant)
    trained = trained_part(model, ADAPTER_PARAMETERS)
    ids = draw_ids(model.config.vocabulary)
    leaves = jax.tree_util.tree_leaves_with_path(gradient_of(trained, model, ids))
    names = [parameter_name(path) for path, _ in leaves]
    assert all(name.endswith((".lora_a", ".lora_b")) for name in names)
    assert len(names) >= 8
    for name, (_, leaf) in zip(names, leaves, strict=True):
        assert np.any(leaf), name


def test_adapters_at_their_start_leave_every_bit(variant):
    base = base_of(variant)
    want = plain_logits(base)
    model = with_adapters(base, CONFIG, jax.random.key(1))
    np.testing.assert_array_equal(plain_logits(model), want)
    assert not np.allclose(logits_of(variant), want, atol=1e-3)


def test_any_cut_equals_the_whole(variant):
    model = adapted(variant)
    pieces = in_pieces(model, draw_ids(model.config.vocabulary), (9, 1, 1, 1, 1))[0]
    assert_values_close(pieces, logits_of(variant))


def test_merged_equals_unmerged(variant):
    want = logits_of(variant)
    got = plain_logits(merged(adapted(variant)))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_a_mesh_changes_nothing(variant):
    model = adapted(variant)
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    placed = jax.device_put(model, shardings(model, mesh))
    with jax.set_mesh(mesh):
        assert_values_close(plain_logits(placed), logits_of(variant))


def test_rank_zero_adds_nothing():
    base = base_of("transformer")
    model = with_adapters(base, AdapterConfig(rank=0), jax.random.key(0))
    np.testing.assert_array_equal(plain_logits(model), plain_logits(base))


def test_options_are_read():
    assert parse_adapters("lora:16") == AdapterConfig(rank=16)
    assert parse_adapters("lora:16:32:q,v") == AdapterConfig(
        rank=16, alpha=32.0, names=("q", "v")
    )
    assert parse_adapters("lora:4::up").names == ("up",)
    assert parse_adapters("lora:16").scale == 1
    assert parse_adapters("lora:16:32").scale == 2
    assert parse_adapters("rslora:16:32").scale == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16", "must be lora:RANK"),
        ("lora:2::nothing", "no matrix of the stack is named nothing; it has down, "),
        ("lora:9", "rank 9 exceeds the smaller side of stack.blocks.0.attention.w_"),
    ],
)
def test_what_does_not_fit_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        with_adapters(base_of("transformer"), parse_adapters(text), jax.random.key(0))
