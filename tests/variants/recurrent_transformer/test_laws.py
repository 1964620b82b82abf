"""The laws of every stack for the variant's switches, and what its layer is."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent_prefill.reference import recurrent_prefill_reference
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.position import LearnedPositions
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.types import Tokens
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.recurrent_transformer.block import spec_of, weights_of
from recurjax.variants.transformer import TransformerConfig
from tests.laws import B, StackLaws, T, draw_ids, quick, run
from tests.tolerances import assert_values_close
from tests.variants.recurrent_transformer.switches import SWITCHES, VOCABULARY, small
from tests.variants.transformer.switches import build


class TestLaws(StackLaws):
    models = SWITCHES
    build = staticmethod(build)
    first = "the_paper"

    def documents(self, config):
        """Positions of a block are counted from the row's start, learned ones too."""
        learned = isinstance(config.stack.position, LearnedPositions)
        return 0 if learned else config.stack.block


@pytest.fixture(scope="module")
def ids():
    return draw_ids(VOCABULARY)


@pytest.mark.parametrize("schedule", ["naive", "prefix", "wavefront"])
def test_the_schedule_changes_nothing_but_rounding(ids, schedule):
    want, _ = run(build(small(tile=16)), ids, build(small()).init_cache(B, 0))
    tile = None if schedule == "naive" else 3
    model = build(small(schedule=schedule, tile=tile))
    assert_values_close(run(model, ids, model.init_cache(B, 0))[0], want)


NAMES_OF_WEIGHTS = ["the_paper", "grouped_rope_layer_norm_biases_wavefront"]


@pytest.mark.parametrize("switch", NAMES_OF_WEIGHTS)
def test_one_block_is_the_transformer_and_so_is_position_0(ids, switch):
    config = SWITCHES[switch]
    transformer = dataclasses.replace(config, stack=as_transformer(config.stack))
    baseline = build(transformer)
    want, _ = run(baseline, ids, baseline.init_cache(B, 0))
    for block in (T, 1):
        stack = dataclasses.replace(config.stack, block=block, tile=None)
        model = build(dataclasses.replace(config, stack=stack))
        # The same weights under the baseline's names.
        nested = to_nested_dict(baseline)
        nested["stack"]["blocks"] = nested["stack"]["blocks"]["0"]
        model = from_nested_dict(model, nested)
        got, _ = run(model, ids, model.init_cache(B, 0))
        seen = slice(None) if block > 1 else slice(1)
        assert_values_close(got[:, seen], want[:, seen])
    assert not np.allclose(got[:, 1:], want[:, 1:], atol=1e-3)


@pytest.mark.parametrize("switch", NAMES_OF_WEIGHTS)
def test_the_stack_is_the_papers_equations(switch):
    model = build(SWITCHES[switch])
    x = np.random.default_rng(3).normal(size=(B, 5, 8)).astype(np.float32)
    stack = model.stack

    @quick
    def by_equations(stack, x):
        spec = spec_of(stack.config, "float32")
        return recurrent_prefill_reference(x, weights_of(stack.blocks), spec=spec)

    @quick
    def by_op(stack, x):
        tokens = Tokens(jnp.zeros(x.shape[:2], jnp.int32))
        return stack(x, stack.init_cache(B, 0, x.dtype), tokens)[0]

    assert_values_close(by_op(stack, x), by_equations(stack, x))


def as_transformer(config: RecurrentTransformerConfig) -> TransformerConfig:
    """The Transformer with the same weights."""
    attention = AttentionConfig(
        heads=config.heads,
        key_heads=config.key_heads,
        head_width=config.head_width,
        position=config.position,
        qk_norm=config.qk_norm,
        qk_norm_over="full",
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
    )
    assert config.norm is not None
    return TransformerConfig(
        layers=config.layers,
        width=config.width,
        attention=attention,
        mlp=config.mlp,
        norm=config.norm,
        residual_scale=config.residual_scale,
    )
