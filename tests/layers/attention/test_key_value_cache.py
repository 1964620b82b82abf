"""The cache against a list of the tokens seen: full caches and rings alike."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.target import Target, as_if
from recurjax.layers.attention import empty_key_value_cache, read_layer, write_layer
from recurjax.layers.attention.key_value_cache import (
    KeyValueCache,
    attend_to_cache,
    slot_positions,
    write,
)
from recurjax.sharding import MeshConfig, make_mesh
from tests.absent_compilers import COMPILERS, ask
from tests.compiling import QUICK_COMPILE
from tests.layers.attention.compile_cases import narrow_decoding
from tests.marks import slow_except


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_each_slot_holds_the_newest_position_of_its_residue(slots):
    for seen in range(9):
        (positions,) = slot_positions(slots, jnp.asarray([seen]))
        for slot, position in enumerate(np.asarray(positions)):
            held = [p for p in range(seen) if p % slots == slot]
            assert position == held[-1] if held else position < 0


@pytest.mark.parametrize("slots", [3, 16])
def test_rows_write_their_own_tokens_at_their_own_positions(slots):
    """Keys are the position + 100 row + 1000 layer; values the same, negated."""
    layers, rows, T = 2, 2, 5
    cache = empty_key_value_cache(layers, rows, slots, 1, 1, jnp.float32)
    seen = np.zeros(rows, int)
    for lengths in ([5, 2], [0, 5], [1, 1]):
        position = seen[:, None] + np.arange(T)
        for layer in range(layers):
            k = jnp.float32(position + 100 * np.arange(rows)[:, None] + 1000 * layer)
            k = k[:, :, None, None]
            at_layer = cache._replace(layer=jnp.int32(layer))
            cache = write(at_layer, k, -k, jnp.asarray(lengths))
        seen += lengths
        cache = cache._replace(position=jnp.asarray(seen, jnp.int32))
        held = np.asarray(slot_positions(slots, cache.position))
        for layer in range(layers):
            code = held + 100 * np.arange(rows)[:, None] + 1000 * layer
            want = np.where(held >= 0, code, 0)
            np.testing.assert_array_equal(cache.keys[layer, :, :, 0, 0], want)
            np.testing.assert_array_equal(cache.values[layer, :, :, 0, 0], -want)


@pytest.mark.parametrize("lengths", [None, [1], [0]])
def test_one_token_of_one_row_lands_in_its_slot_or_nowhere(lengths):
    cache = empty_key_value_cache(2, 1, 3, 1, 2, jnp.float32)
    cache = cache._replace(position=jnp.asarray([4]), layer=jnp.int32(1))
    k = jnp.asarray([5.0, 6.0]).reshape(1, 1, 1, 2)
    written = write(cache, k, -k, None if lengths is None else jnp.asarray(lengths))
    want = np.zeros((2, 1, 3, 1, 2), np.float32)
    want[1, 0, 1, 0] = [0, 0] if lengths == [0] else [5, 6]
    np.testing.assert_array_equal(written.keys, want)
    np.testing.assert_array_equal(written.values, -want)


@pytest.mark.parametrize(
    "slots, window", [pytest.param(8, None, marks=pytest.mark.sweep), (4, 3)]
)
def test_a_token_is_seen_beside_its_write_as_after_it(slots, window):
    """Of layers that share no stack, as a TPU's decode step has them."""
    rows = 3
    k, v, keys, values, q = (
        jax.random.normal(key, (rows, n, 2, 4))
        for key, n in zip(
            jax.random.split(jax.random.key(0), 5), (1, 1, slots, slots, 1), strict=True
        )
    )
    cache = KeyValueCache(
        keys[None], values[None], jnp.asarray([0, 2, 7]), jnp.int32(0)
    )
    options = {"scale": 0.5, "window": window, "lengths": jnp.asarray([1, 1, 0])}
    twice = (jnp.concatenate([x[None], x[None]]) for x in (keys, values))
    stack = KeyValueCache(*twice, cache.position, cache.layer)
    with as_if(Target(platform="tpu", kind="TPU v5 lite")):
        expected, after = attend_to_cache(q, k, v, stack, **options)
        got, written = attend_to_cache(q, k, v, cache, **options)
    chex.assert_trees_all_equal(got, expected)
    chex.assert_trees_all_equal(written.keys[0], after.keys[0])
    chex.assert_trees_all_equal(written.values[0], after.values[0])


def test_a_write_without_lengths_writes_all_and_casts():
    cache = empty_key_value_cache(1, 1, 4, 1, 2, jnp.bfloat16)
    k = jnp.arange(6.0).reshape(1, 3, 1, 2)
    written = write(cache, k, k + 1, None)
    assert written.keys.dtype == jnp.bfloat16
    np.testing.assert_array_equal(written.keys[0, 0, :, 0, 0], [0, 2, 4, 0])
    np.testing.assert_array_equal(written.values[0, 0, :, 0, 1], [2, 4, 6, 0])
    np.testing.assert_array_equal(written.position, [0])


def test_the_training_cache_keeps_nothing():
    cache = empty_key_value_cache(2, 3, 0, 1, 4, jnp.float32)
    assert cache.slots == 0
    assert cache.keys.size == 0


def test_layers_are_read_and_replaced_one_at_a_time():
    """What one layer writes is in its entry, and in no other."""
    empty = empty_key_value_cache(3, 2, 3, 1, 2, jnp.float32)
    new = jnp.arange(1.0, 13).reshape(2, 3, 1, 2)
    changed = write_layer(empty.keys, jnp.int32(2), new)
    np.testing.assert_array_equal(read_layer(changed, jnp.int32(2)), new)
    assert not np.any(changed[:2])


@pytest.mark.parametrize("key_heads, cut", [(1, 2), (4, 3)])
def test_a_cache_is_cut_by_slots_where_tensor_does_not_divide_its_heads(key_heads, cut):
    """Left alone, XLA cuts one head along its width, and gathers it to read."""
    mesh = make_mesh(MeshConfig(data=2, tensor=4), jax.devices()[:8])
    B, T, slots, heads, width = 4, 40, 64, 8, 16
    draw = np.random.default_rng(0)

    def values(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    prompt = [values(B, T, key_heads, width) for _ in range(2)]
    token = [values(B, 1, n, width) for n in (heads, key_heads, key_heads)]

    def read_on(prompt, token):
        cache = empty_key_value_cache(2, B, slots, key_heads, width, jnp.float32)
        cache = write(cache, *prompt, None)
        cache = cache._replace(position=jnp.full(B, T))
        return attend_to_cache(*token, cache, scale=0.3, window=None, lengths=None)

    want = jax.jit(read_on)(prompt, token)

    def laid(x):
        # As the products leave them: full heads, or the width of too few.
        spec = P(
            "data", None, *(("tensor", None) if x.shape[2] > 1 else (None, "tensor"))
        )
        return jax.device_put(x, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        run = jax.jit(read_on, compiler_options=QUICK_COMPILE)
        o, written = run(*jax.tree.map(laid, (prompt, token)))
    chex.assert_trees_all_close(o, want[0], rtol=2e-5, atol=1e-6)
    for name in ("keys", "values"):
        result = getattr(written, name)
        chex.assert_trees_all_equal(result, getattr(want[1], name))
        assert result.sharding.spec[cut] == "tensor"


@pytest.mark.parametrize("axes", [{}, {"data": 4, "tensor": 2}], ids=["one", "mesh"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("T", slow_except(["1", "9"], [1, 5, 9, 200], slow=()))
def test_tokens_are_written_for_tpus_as_for_others(axes, padded, T):
    """A few slice by slice, more by their layer, where slots lie side by side."""
    B, slots, K, E = 4, 128, 2, 8
    draw = np.random.default_rng(0)
    k, old = (
        jnp.asarray(draw.normal(size=shape), jnp.float32)
        for shape in ((B, T, K, E), (2, B, slots, K, E))
    )
    cache = KeyValueCache(old, -old, jnp.asarray([0, 5, 127, 300]), jnp.int32(1))
    count = jnp.asarray([T, 0, 1, T // 2]) if padded else None

    def written(cache, k):
        result = write(cache, k, -k, count)
        return result.keys, result.values

    want = jax.jit(written)(cache, k)
    mesh = make_mesh(
        MeshConfig(**(axes or {"data": 1})), jax.devices()[: 8 if axes else 1]
    )
    with as_if(Target(platform="tpu", kind="a TPU")), jax.set_mesh(mesh):
        result = jax.jit(written, compiler_options=QUICK_COMPILE).lower(cache, k)
        assert "stablehlo.scatter" not in result.as_text()
        chex.assert_trees_all_equal(result.compile()(cache, k), want)


@pytest.mark.parametrize(
    ("case", "share"),
    [
        pytest.param("narrow_decoding", 0.1, marks=pytest.mark.slow),
        ("narrow_prompt", 0.4),
    ],
)
def test_narrow_heads_caches_lie_in_a_tpu_as_they_come(case, share):
    """A scatter held both caches of all layers filled up: 2.6 times their bytes.

    A prompt's layers are rewritten, one after the other, two of twelve at once.
    """
    if not (COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")
    cases = "tests.layers.attention.compile_cases"
    summary = ask("v5e:2x2", "tests.compile_target:summary_of", f"{cases}:{case}")
    _, caches = narrow_decoding()
    assert summary["temp_bytes"] < share * caches[0].size * caches[0].dtype.itemsize


def _prompt_read(T, *, slots, window=None, lengths=None, alibi=False, heads=4, E=8):
    """Returns a function that reads T tokens after a cache, and shapes for it."""
    slopes = jnp.asarray([0.5, 0.25, 0.125, 0.0625])[:, None, None]

    def bias(query_positions, key_positions):
        distance = query_positions[:, None, :, None] - key_positions[:, None, None]
        return -slopes * distance.astype(jnp.float32)

    def read(q, k, v, cache):
        return attend_to_cache(
            *(q, k, v, cache),
            scale=0.3,
            window=window,
            lengths=lengths,
            soft_cap=20.0,
            bias=bias if alibi else None,
        )

    shape = lambda n: jax.ShapeDtypeStruct((2, T, n, E), jnp.float32)  # noqa: E731
    cache = jax.eval_shape(
        lambda: empty_key_value_cache(1, 2, slots, 2, E, jnp.float32)
    )
    return read, (shape(heads), shape(2), shape(2), cache)


# The second piece's queries look 256 at a time, 88 at last; those of its halves all at
# once. Rows stand at positions of their own before it.
@pytest.mark.parametrize(
    ("slots", "options"),
    [(700, {"alibi": True}), (100, {"window": 100}), (130, {"window": 100})],
    ids=["cache", "ring", "wider ring"],
)
def test_a_long_prompt_is_read_in_blocks_as_its_halves_are(slots, options):
    lengths = np.asarray([640, 437])
    _, shapes = _prompt_read(640, slots=slots, **options)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=s.shape), jnp.float32) for s in shapes[:3]]

    def in_pieces(*cuts):
        cache, matches = empty_key_value_cache(1, 2, slots, 2, 8, jnp.float32), []
        done = np.zeros(2, int)
        for piece in cuts:
            count = np.minimum(piece, lengths - done)
            # Each row's next tokens, at any position; padding is any token.
            at = np.minimum(done[:, None] + np.arange(max(piece)), 639)[..., None, None]
            new = (np.take_along_axis(np.asarray(x), at, axis=1) for x in arrays)
            read, _ = _prompt_read(
                max(piece), slots=slots, lengths=jnp.asarray(count), **options
            )
            o, cache = read(*map(jnp.asarray, new), cache)
            cache = cache._replace(position=cache.position + count)
            matches.append([row[:n] for row, n in zip(o, count, strict=True)])
            done += count
        rows = [jnp.concatenate(row) for row in zip(*matches, strict=True)]
        return jnp.concatenate(rows), cache

    first = np.asarray([40, 17])
    rest = np.asarray([600, 600])
    o, cache = jax.jit(lambda: in_pieces(first, rest))()
    want, of_halves = jax.jit(lambda: in_pieces(first, rest // 2, rest // 2))()
    np.testing.assert_allclose(o, want, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(cache.keys, of_halves.keys)


def test_a_long_prompt_never_has_all_logits_at_once():
    read, shapes = _prompt_read(2048, slots=2048)
    compiled = jax.jit(read).lower(*shapes).compile()
    logits = 4 * 2 * 4 * 2048**2
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < logits / 3
