"""The authors' RAT and RNN layers: values, gradients, what is inside, generation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chunk_attention import ChunkEnds
from pallas_kernels.gated_scan import gated_scan, key_logits
from recurjax.layers.position import Rope, rotate
from recurjax.parameters import to_nested_dict
from recurjax.types import Tokens
from recurjax.variants.rat.recurrence import attend_across_chunks, rotate_chunks
from tests.compiling import QUICK_COMPILE
from tests.golden.cases import golden_cases, largest_of_each, load
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.rat import authors

RAT = golden_cases("rat/rat_*.npz")
CASES = RAT + golden_cases("rat/rnn*.npz")
AUTHORS_ABSOLUTE = 1e-5


@pytest.mark.parametrize("path", CASES)
def test_values_and_gradients_are_the_authors(path):
    case, meta, layer = read_case(path)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(layer, x):
        y, _ = apply(layer, x, layer.mixer.init_cache(1, x.shape[0], 0, x.dtype))
        return jnp.sum(y * case["dy"]), y

    (_, y), (for_layer, for_x) = run(layer, jnp.asarray(case["x"]))
    gradients = {"x": for_x, **to_nested_dict(for_layer)}
    config = authors.mixer_config(meta["kind"], meta)
    # Their float64 run keeps float32 rotation angles: it is held to float32 here too.
    for wide in ("", "64"):
        if f"out{wide}" not in case:
            continue
        assert_authors(y, case[f"out{wide}"])
        want, whole = (
            {
                "x": tensors[f"grad{wide}/x"],
                **authors.layer(authors.read(tensors, f"grad{wide}/param"), config),
            }
            for tensors in (case, largest_of_each(case))
        )
        assert_gradients_close(gradients, want, whole=whole)


@pytest.mark.parametrize("path", CASES)
def test_prefill_then_steps_give_the_authors_values_and_cache(path):
    case, meta, layer = read_case(path)
    x = jnp.asarray(case["x"])
    prefills = sorted(
        int(name.removeprefix("gen").removesuffix("/out"))
        for name in case
        if name.startswith("gen") and name.endswith("/out")
    )
    assert prefills
    for prefill in prefills:
        cache = layer.mixer.init_cache(1, x.shape[0], x.shape[1], x.dtype)
        y, trace, cache = generate(layer, x, cache, prefill=prefill)
        case_of = authors.read(case, f"gen{prefill}")
        assert_authors(y, case_of["out"])
        last = ("v", "k") if meta["kind"] == "rat" else ("v",)
        for name, states in zip(last, trace, strict=True):
            assert_authors(states, case_of[f"trace/{name}_last"])
            end = np.asarray(states[:, -1:])
            assert_authors(end, case_of[f"cache_end/{name}_last"])
        if meta["kind"] == "rat":
            done = x.shape[1] // meta["chunk_size"]
            for name, kept in (("k", cache.keys), ("v", cache.values)):
                want = case_of[f"cache_end/{name}_chunk"][:, :, :done]
                assert_authors(kept[0][:, :, :done], want)


@pytest.mark.parametrize("path", CASES)
def test_gates_and_states_are_the_authors(path):
    case, meta, layer = read_case(path)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def inside(layer, x):
        n = layer.mixer_norm(x)
        project = lambda w: n @ w[...].reshape(n.shape[-1], -1)  # noqa: E731
        result = {
            "normed": n,
            "z": layer.mixer.output_gate(n),
            "g": layer.mixer.forget_gate(n),
            "v": project(layer.mixer.w_v),
        }
        if meta["kind"] == "rat":
            k = project(layer.mixer.w_k)
            result |= {"q_group": project(layer.mixer.w_q), "k_group": k}
            states = gated_scan(
                result["g"], (result["v"], k), chunk=meta["chunk_size"]
            ).states
            result |= dict(zip(("v_tilde", "k_tilde"), states, strict=True))
        return result

    for name, array in inside(layer, jnp.asarray(case["x"])).items():
        if f"mid/{name}" in case:
            assert_authors(array, case[f"mid/{name}"])


@pytest.mark.parametrize("path", RAT)
def test_attention_across_chunks_is_the_authors(path):
    """Rotations, weights and outputs, from the authors' own q and states."""
    case, meta, _ = read_case(path)
    C, H = meta["chunk_size"], meta["num_head"]
    B, T, D = case["x"].shape
    E, numbers = D // H, jnp.arange(T // C)[None]
    q = jnp.asarray(case["mid/q_group"]).reshape(B, T, -1, E)
    k, v = (jnp.asarray(case[f"mid/{name}_tilde"]).reshape(B, T, H, E) for name in "kv")
    rotated = rotate_chunks(q, numbers, Rope())
    assert_authors(jnp.tile(rotated, (1, 1, H // q.shape[2], 1)), heads(case, "q_rope"))
    all_keys = rotate(k, jnp.repeat(numbers, C, axis=1), Rope())
    assert_authors(all_keys, heads(case, "k_tilde_rope"))
    ends = ChunkEnds(
        keys=all_keys[:, C - 1 :: C].swapaxes(1, 2),
        values=v[:, C - 1 :: C].swapaxes(1, 2),
    )
    own_logits = jax.jit(key_logits)(q, k.reshape(B, T, D))
    y = jax.jit(partial(attend_across_chunks, size=C))(own_logits, rotated, v, ends)
    assert_authors(y.reshape(B, T, D), case["mid/attn_out"])
    # The weights: attention to values that are unit vectors.
    weights = []
    for chunk in range(T // C + 1):
        own = jnp.full((B, T, H, E), float(chunk == T // C))
        one = jnp.zeros_like(ends.values)
        one = one if chunk == T // C else one.at[:, :, chunk].set(1)
        picked = ChunkEnds(ends.keys, one)
        weights.append(ATTEND(own_logits, rotated, own, picked, size=C)[..., 0])
    got = jnp.stack(weights, axis=-1).swapaxes(1, 2)
    assert_values_close(got, case["mid/attn_weights"])


ATTEND = jax.jit(
    attend_across_chunks, static_argnames="size", compiler_options=QUICK_COMPILE
)


def heads(case, name: str) -> np.ndarray:
    return case[f"mid/{name}"].swapaxes(1, 2)


def read_case(path):
    case = load(path)
    meta = authors.meta_of(case)
    return case, meta, authors.build_layer(case, meta)


def assert_authors(got, want) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=AUTHORS_ABSOLUTE)


def apply(layer, x, cache):
    tokens = Tokens(ids=jnp.zeros(x.shape[:2], jnp.int32))
    y, cache = layer.mixer(layer.mixer_norm(x), cache, tokens)
    return x + y, cache


@partial(jax.jit, static_argnames="prefill", compiler_options=QUICK_COMPILE)
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
        states = (
            (cache.v_state[0], cache.k_state[0])
            if hasattr(cache, "k_state")
            else (cache.state[0],)
        )
        return cache, (y[:, 0], states)

    cache, (steps, trace) = jax.lax.scan(step, cache, x[:, prefill:].swapaxes(0, 1))
    parts.append(steps.swapaxes(0, 1))
    trace = [states.swapaxes(0, 1) for states in trace]
    return jnp.concatenate(parts, axis=1), trace, cache
