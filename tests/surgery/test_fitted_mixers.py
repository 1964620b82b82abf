"""Mixers fitted to the heads they replace: what is recorded, and that it is learned."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.layers.position import LearnedPositions
from recurjax.parameters import to_nested_dict
from recurjax.surgery import recurformer
from recurjax.surgery.recurformer import fit_mixers, record_heads, to_recurformer
from recurjax.training.checkpoint.manifest import named
from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE
from tests.training.compilation import quick_compilation
from tests.variants.recurformer.switches import MAMBA
from tests.variants.transformer import switches as transformer

__all__ = ["quick_compilation"]

quick = partial(jax.jit, compiler_options=QUICK_COMPILE)
IDS = np.random.default_rng(0).integers(17, size=(6, 12), dtype=np.int32)


@pytest.mark.parametrize(
    "switches",
    [
        {"key_heads": 2, "attention": {"qkv_bias": True}},
        pytest.param(
            {
                "windows": (None, 4),
                "attention": {"position": LearnedPositions(length=transformer.LENGTH)},
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_recorded_is_what_the_base_adds_up(switches, quick_compilation):
    """Every head's output through W_out is what the base's attention writes."""
    base = transformer.build(transformer.small(layers=2, **switches))
    places = base.stack.blocks

    @quick
    def pass_on(place, layer, x, outputs):
        """The layer, with these outputs of its heads."""
        block = jax.tree.map(lambda leaf: leaf[layer // len(places)], place)
        y = x + jnp.einsum("bthe,hed->btd", outputs, block.attention.w_out[...])
        return y + block.mlp(block.mlp_norm(y))

    tokens = Tokens(jnp.asarray(IDS))
    states = list(base.stack.layer_states(base.embed(tokens.ids), tokens))
    K = base.config.stack.attention.key_heads
    every = [(tuple(range(K)), (0, 1, 2, 3))] * 2
    for layer, values, outputs in record_heads(base, IDS, every):
        got = pass_on(places[layer % len(places)], layer, states[layer], outputs)
        np.testing.assert_allclose(got, states[layer + 1], rtol=2e-5, atol=2e-5)
        assert values.shape == (6, 12, base.config.stack.attention.key_heads, 4)


def test_the_fit_lowers_every_layers_error_and_touches_nothing_else(
    quick_compilation,
):
    base = transformer.build(transformer.small(key_heads=2))
    model = to_recurformer(base, ((0, 3), (1, 2)), mamba=MAMBA)
    seen = []
    fitted, fits = fit_mixers(base, model, IDS, steps=60, rate=0.02, report=seen.append)
    assert seen == fits and [fit.layer for fit in fits] == [0, 1]
    assert all(fit.after < 0.8 * fit.before for fit in fits), fits
    before, after = (named(to_nested_dict(item)) for item in (model, fitted))
    for name, array in before.items():
        assert np.array_equal(array, after[name]) == (".mamba." not in name), name


def test_errors_are_relative_to_the_mean_square_of_the_texts_fitted_to(monkeypatch):
    base = transformer.build(transformer.small(key_heads=2))
    model = to_recurformer(base, ((0, 3), ()), mamba=MAMBA)
    sizes = []

    def step(mamba, moments, v, o, size, rate):
        sizes.append(float(size))
        return mamba, moments

    monkeypatch.setattr(recurformer, "_step", step)
    fit_mixers(base, model, IDS, steps=2, rate=0.02, report=lambda fit: None)
    groups = [((0, 1), (0, 3)), ((), ())]
    _, _, outputs = next(record_heads(base, IDS, groups))
    # One text of six is held out.
    want = np.square(outputs[:5]).mean()
    np.testing.assert_allclose(sizes, [want, want], rtol=1e-5)


def test_what_cannot_be_fitted_is_refused(quick_compilation):
    base = transformer.build(transformer.small())
    model = to_recurformer(base, ((0,), ()), mamba=MAMBA)
    for ids, steps, rate, said in (
        (IDS[:0], 1, 0.1, "--text is empty"),
        (IDS, 0, 0.1, "steps of at least 1"),
        (IDS, 1, float("nan"), "a rate above 0"),
        (IDS, 3, 1e30, "diverged at --fit-rate"),
    ):
        with pytest.raises(UserError, match=said):
            fit_mixers(base, model, ids, steps=steps, rate=rate)
