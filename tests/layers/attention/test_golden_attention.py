"""RAT's attention and sliding-window baselines: one pre-norm layer and its residual."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.attention import (
    AttentionConfig,
    SelfAttention,
    empty_key_value_cache,
)
from recurjax.layers.initialization import InitConfig
from recurjax.layers.norm import Norm, NormConfig
from recurjax.layers.position import Rope, rotate
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.types import Tokens
from tests.golden.cases import golden_cases, largest_of_each, load
from tests.golden.torch_layout import rat_attention
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.rat import authors

CASES = golden_cases("rat/attention*.npz", "rat/swa*.npz")
AUTHORS_ABSOLUTE = 1e-5


@pytest.mark.parametrize("path", CASES)
def test_values_and_gradients_are_the_authors(path):
    case = load(path)
    meta = authors.meta_of(case)

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(layer, x):
        y, _ = apply(layer, x, empty_cache(meta, x, slots=0))
        return jnp.sum(y * case["dy"]), y

    (_, y), (for_layer, for_x) = run(layer_of(case, meta), jnp.asarray(case["x"]))
    gradients = {"x": for_x, **to_nested_dict(for_layer)}
    # Their float64 run keeps float32 rotation angles: it is held to float32 here too.
    for wide in ("", "64"):
        if f"out{wide}" not in case:
            continue
        np.testing.assert_allclose(y, case[f"out{wide}"], rtol=0, atol=AUTHORS_ABSOLUTE)
        want, whole = (
            gradients_of(tensors, f"grad{wide}", meta)
            for tensors in (case, largest_of_each(case))
        )
        assert_gradients_close(gradients, want, whole=whole)


@pytest.mark.parametrize("path", CASES)
def test_prefill_then_steps_give_the_authors_values_and_cache(path):
    case = load(path)
    meta = authors.meta_of(case)
    layer = layer_of(case, meta)
    x = jnp.asarray(case["x"])
    prefills = sorted(
        int(name.removeprefix("gen").removesuffix("/out"))
        for name in case
        if name.startswith("gen") and name.endswith("/out")
    )
    assert prefills
    for prefill in prefills:
        y, cache = generate(layer, x, empty_cache(meta, x), prefill=prefill)
        wanted = case[f"gen{prefill}/out"]
        np.testing.assert_allclose(y, wanted, rtol=0, atol=AUTHORS_ABSOLUTE)
        ours = np.concatenate([cache.keys[0], cache.values[0]], axis=-1)
        theirs = np.concatenate(
            [case[f"gen{prefill}/cache_end/{name}"] for name in "kv"], axis=-1
        )
        newest = ours.shape[1] if meta["window"] is None else meta["window"]
        assert_same_slots(ours.swapaxes(1, 2), theirs, newest=newest)


@pytest.mark.parametrize("path", CASES)
def test_rotation_angles_are_the_authors(path):
    case = load(path)
    cos, sin = case["mid/cos"], case["mid/sin"]
    T, E = cos.shape
    one = jnp.zeros((1, T, 1, E)).at[..., : E // 2].set(1)
    rotated = rotate(one, jnp.arange(T)[None], Rope())[0, :, 0]
    want = np.concatenate([cos[:, : E // 2], sin[:, : E // 2]], axis=-1)
    assert_values_close(rotated, want)


def layer_of(case, meta) -> nnx.Dict:
    config = AttentionConfig(
        heads=meta["num_head"],
        key_heads=meta["num_head"],
        head_width=meta["d_head"],
        position=Rope(),
    )

    def make() -> nnx.Dict:
        norm = Norm(NormConfig(kind="rms", eps=1e-6), meta["d_model"])
        attention = SelfAttention(
            config,
            meta["d_model"],
            InitConfig(),
            window=meta["window"],
            layer=0,
            layers=1,
            rngs=nnx.Rngs(0),
        )
        return nnx.Dict(norm=norm, attention=attention)

    nested = rat_attention(weights_of(case).get, heads=meta["num_head"])
    return from_nested_dict(jax.eval_shape(make), jax.tree.map(jnp.asarray, nested))


def weights_of(case) -> dict[str, np.ndarray]:
    names = [name for name in case if name.startswith("param/")]
    return {name.removeprefix("param/"): case[name] for name in names}


def gradients_of(case, folder: str, meta) -> dict:
    named = {name: case[f"{folder}/param/{name}"] for name in weights_of(case)}
    return {
        "x": case[f"{folder}/x"],
        **rat_attention(named.get, heads=meta["num_head"]),
    }


def empty_cache(meta, x, slots: int | None = None):
    B, T = x.shape[:2]
    if slots is None:
        slots = T if meta["window"] is None else min(T, meta["window"] + 1)
    return empty_key_value_cache(1, B, slots, meta["num_head"], meta["d_head"], x.dtype)


def apply(layer, x, cache):
    tokens = Tokens(ids=jnp.zeros(x.shape[:2], jnp.int32))
    y, cache = layer.attention(layer.norm(x), cache, tokens)
    return x + y, cache


@partial(jax.jit, static_argnames="prefill")
def generate(layer, x, cache, *, prefill: int):
    def advance(cache, x):
        y, cache = apply(layer, x, cache)
        return cache._replace(position=cache.position + x.shape[1]), y

    parts = []
    if prefill:
        cache, y = advance(cache, x[:, :prefill])
        parts.append(y)

    def step(cache, x_t):
        cache, y = advance(cache, x_t[:, None])
        return cache, y[:, 0]

    cache, steps = jax.lax.scan(step, cache, x[:, prefill:].swapaxes(0, 1))
    return jnp.concatenate([*parts, steps.swapaxes(0, 1)], axis=1), cache


def assert_same_slots(ours: np.ndarray, theirs: np.ndarray, *, newest: int) -> None:
    """Compares [B, H, S, 2E] as sets.

    Theirs may hold the newest token twice, in the ring and next to it, in place of the
    oldest, which no later query sees: only our `newest` slots must be there.
    """
    assert ours.shape == theirs.shape
    distance = np.abs(ours[:, :, :, None] - theirs[:, :, None, :]).max(axis=-1)
    theirs_in_ours = distance.min(axis=2)
    assert theirs_in_ours.max() < AUTHORS_ABSOLUTE
    ours_in_theirs = np.sort(distance.min(axis=3), axis=-1)[..., :newest]
    assert ours_in_theirs.max() < AUTHORS_ABSOLUTE
