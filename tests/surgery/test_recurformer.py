"""Heads replaced in a trained model; what it keeps afterwards, and what that costs."""

import jax
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.model import count_parameters
from recurjax.parameters import to_nested_dict
from recurjax.surgery.recurformer import to_recurformer
from recurjax.types import Tokens
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.recurformer.config import added_parameters, cache_bytes
from recurjax.variants.transformer import TransformerConfig
from tests.compiling import QUICK_COMPILE
from tests.variants.transformer import switches as transformer

MAMBA = MambaConfig(state=3, dt_rank=2)
IDS = np.random.default_rng(0).integers(17, size=(2, 13), dtype=np.int32)


def logits(model):
    run = jax.jit(
        lambda m: m(Tokens(IDS), m.init_cache(2, 0))[0], compiler_options=QUICK_COMPILE
    )
    return np.asarray(run(model))


def test_nothing_replaced_is_the_model_itself():
    base = transformer.build(
        transformer.small(key_heads=2, layers=4, windows=(3, None))
    )
    same = to_recurformer(base, ((),) * 4, mamba=MAMBA)
    np.testing.assert_array_equal(logits(same), logits(base))


def test_remaining_heads_keep_their_weights_and_attend_as_before():
    base = transformer.build(
        transformer.small(key_heads=2, attention={"qkv_bias": True})
    )
    model = to_recurformer(base, ((0,), (0, 1, 2, 3)), mamba=MAMBA, seed=1)
    old = jax.tree.map(np.asarray, to_nested_dict(base)["stack"]["blocks"]["0"])
    new = to_nested_dict(model)["stack"]["layers"]
    first, second = (old_layer(old, layer)["attention"] for layer in range(2))
    got = new["0"]["attention"]
    np.testing.assert_array_equal(got["w_q"], first["w_q"][:, 1:])
    np.testing.assert_array_equal(got["b_q"], first["b_q"][1:])
    for name in ("w_k", "b_k", "w_v", "b_v", "w_out"):
        np.testing.assert_array_equal(got[name], first[name])
    assert not {"w_q", "w_k", "b_q", "b_k"} & set(new["1"]["attention"])
    np.testing.assert_array_equal(new["1"]["attention"]["w_v"], second["w_v"])
    # Mamba's outputs silenced, the other heads' part of a layer is the base's.
    assert np.isfinite(logits(model)).all()
    other = to_recurformer(base, ((0,), (0, 1, 2, 3)), mamba=MAMBA, seed=2)
    assert not np.array_equal(logits(model), logits(other))


def old_layer(blocks, layer):
    return jax.tree.map(lambda leaf: leaf[layer], blocks)


@pytest.mark.parametrize(
    "replaced", [((0,), (0, 1, 2, 3)), ((0, 3), ()), ((1, 2), (0, 1))]
)
@pytest.mark.parametrize("bias", [False, True])
def test_counts_are_those_of_the_real_arrays(replaced, bias):
    base = transformer.small(key_heads=2, attention={"qkv_bias": bias})
    model = to_recurformer(transformer.build(base), replaced, mamba=MAMBA)
    stack = model.config.stack
    grown = count_parameters(model.config).total - count_parameters(base).total
    assert added_parameters(stack) == grown
    counted = cache_bytes(stack, 29, value_bytes=4)
    cache = model.init_cache(1, 29)
    real = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(part))
        for part in (
            [(c.keys_values.keys, c.keys_values.values) for c in cache.layers],
            [c.mamba for c in cache.layers],
        )
    ]
    assert [counted.keys_values, counted.states] == real
    plain = transformer.build(base).init_cache(1, 29).groups[0]
    assert counted.base == plain.keys.nbytes + plain.values.nbytes


def llama2(share: float) -> RecurFormerConfig:
    """Llama-2 7B with round(beta 1024) heads replaced, the first ones."""
    base = TransformerConfig(
        layers=32,
        width=4096,
        attention=AttentionConfig(heads=32, key_heads=32, head_width=128),
        mlp=MlpConfig(width=11008),
    )
    left = round(share * 1024)
    replaced = tuple(
        tuple(range(min(32, max(0, left - 32 * layer)))) for layer in range(32)
    )
    return RecurFormerConfig(transformer=base, replaced=replaced, mamba=MambaConfig())


@pytest.mark.parametrize(
    ("share", "short", "long"),
    [
        (0.25, 0.7510, 0.7502),
        (0.5, 0.5020, 0.5003),
        (0.75, 0.2529, 0.2505),
        (0.9, 0.1031, 0.1002),
        (1.0, 0.0039, 0.0007),
    ],
)
def test_llama2_keeps_what_the_paper_says(share, short, long):
    config = llama2(share)
    assert cache_bytes(config, 10240).share == pytest.approx(short, abs=6e-5)
    assert cache_bytes(config, 61440).share == pytest.approx(long, abs=6e-5)


def test_a_mixer_of_29_heads_has_the_size_that_the_readme_states():
    base = llama2(0.0).transformer
    config = RecurFormerConfig(
        transformer=base,
        replaced=(tuple(range(29)),) + ((),) * 31,
        mamba=MambaConfig(),
    )
    gone = 2 * 29 * 128 * 4096
    assert added_parameters(config) + gone == pytest.approx(86.6e6, rel=0.01)


def test_grouped_heads_free_no_more_than_their_groups():
    """Qwen2 0.5B, 14 heads on 2 key heads: the share never falls below 1 - beta."""
    base = TransformerConfig(
        layers=24,
        width=896,
        attention=AttentionConfig(heads=14, key_heads=2, head_width=64),
        mlp=MlpConfig(width=4864),
    )
    for replaced, kept in ((tuple(range(6)), 1.0), (tuple(range(7)), 0.5)):
        config = RecurFormerConfig(
            transformer=base, replaced=(replaced,) * 24, mamba=MambaConfig()
        )
        share = cache_bytes(config, 10240).share
        assert kept <= share < kept + 0.06 and share >= 1 - len(replaced) / 14


def test_what_cannot_be_replaced_is_one_sentence():
    base = transformer.build(transformer.small())
    for replaced in (((0,),), ((4,), ()), ((1, 1), ())):
        with pytest.raises(UserError, match="RecurFormerConfig"):
            to_recurformer(base, replaced, mamba=MAMBA)
    from tests.variants.rat import switches as rat

    other = transformer.build(rat.SWITCHES["rat"])
    with pytest.raises(UserError, match="only heads of a Transformer"):
        to_recurformer(other, ((), ()), mamba=MAMBA)
