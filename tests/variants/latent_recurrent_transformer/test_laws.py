"""The laws of every stack for the memory's switches, and those of its schedules."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recurjax.losses.cross_entropy import token_losses
from recurjax.parameters import from_nested_dict, parameter_name, to_nested_dict
from recurjax.training.spikes import SpikeConfig
from recurjax.training.step import first_state, train_step
from recurjax.types import IGNORED, Batch, Tokens
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from recurjax.variants.latent_recurrent_transformer.objectives import (
    Chunked,
    Interleaved,
    interleaved_passes,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    newest,
    put,
    strided_partition,
)
from tests.laws import B, StackLaws, draw_ids, quick, run
from tests.marks import slow_except
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.latent_recurrent_transformer.switches import (
    RECURRENT,
    RESET,
    SWITCHES,
    VOCABULARY,
    build,
    small,
)

T = 6
SHARED = SWITCHES["shared"]
slow = partial(pytest.param, marks=pytest.mark.slow)
# A token's own state comes from a forward on the tokens before it: in the recurrence on
# refined tokens, in training on the initial pass. So the two differ there.
MEMORIES = slow_except(
    ["shared"],
    [name for name in RECURRENT if name != "own state"],
    slow=["keys, averaged lags, reset"],
)


class TestLaws(StackLaws):
    models = SWITCHES
    build = staticmethod(build)
    slow = frozenset({"keys, averaged lags, reset"})
    rare = frozenset(SWITCHES) - slow - {"baseline", "shared"}
    first = "shared"

    def documents(self, config):
        """The exact recurrence takes none; `reset_token` parts documents there."""
        return 1 if config.stack.memory is None else None


@pytest.fixture(scope="module")
def ids():
    return draw_ids(VOCABULARY, T)


@pytest.fixture(scope="module", params=MEMORIES)
def latent(request):
    return build(SWITCHES[request.param])


@partial(quick, static_argnames=("partition", "refresh"))
def merged(model, ids, partition, refresh=False):
    """The last pass of each position, in the order of the partition's slices."""
    batch = Batch(ids, ids)
    (_, x), *refined = interleaved_passes(
        model, batch, slices(partition), refresh=refresh
    )
    for positions, y in zip(slices(partition), [y for _, y in refined], strict=True):
        x = put(x, positions, y)
    return model.logits(x)


def slices(partition):
    return tuple(slice(*cut) for cut in partition)


def cuts(partition):
    return tuple((cut.start, cut.stop, cut.step) for cut in partition)


SINGLE = tuple((t, t + 1, 1) for t in range(T))


def test_singletons_are_the_exact_recurrence(latent, ids):
    exact, _ = run(latent, ids, latent.init_cache(B, 0))
    assert_values_close(merged(latent, ids, SINGLE), exact)


@pytest.mark.slow
def test_n_sweeps_of_two_subsets_are_exact_for_2_n_positions(ids):
    """And position S after one sweep is not: its memory is refined, not its keys'."""
    model = build(SHARED)
    exact, _ = run(model, ids, model.init_cache(B, 0))
    sweep = cuts(strided_partition(T, 2))
    one, two = merged(model, ids, sweep), merged(model, ids, sweep * 2)
    assert_values_close(one[:, :2], exact[:, :2])
    assert_values_close(two[:, :4], exact[:, :4])
    assert np.abs(one[:, 2] - exact[:, 2]).max() > 1e-3


def test_position_0_refined_is_initial(ids):
    model = build(SHARED)
    first = merged(model, ids, ())
    assert_values_close(merged(model, ids, ((0, None, 2),))[:, 0], first[:, 0])


@pytest.mark.sweep
def test_refreshed_singletons_are_exact_too(ids):
    """Whatever a token sees has been visited by then; earlier subsets see less."""
    model = build(SHARED)
    exact, _ = run(model, ids, model.init_cache(B, 0))
    assert_values_close(merged(model, ids, SINGLE, refresh=True), exact)
    pair = cuts(strided_partition(T, 2))
    plain = merged(model, ids, pair)
    assert np.abs(merged(model, ids, pair, refresh=True) - plain).max() > 1e-3


@partial(quick, static_argnames="visited")
def groups_refreshed_and_refined(model, ids, visited=()):
    """Keys and values after a refresh, after none, and after a pass over all."""
    tokens, x = Tokens(ids), model.embed(ids)
    _, buffer = model.stack.initial(x, tokens, origins=True)
    done = jnp.isin(jnp.arange(T), jnp.asarray(visited, jnp.int32))
    refreshed = model.stack.refreshed(buffer, tokens, visited=done)
    _, refined = model.stack.refine(x, tokens, slice(0, None, 1), buffer)
    return tuple(
        (each.groups[0].keys, each.groups[0].values)
        for each in (refreshed, buffer, refined)
    )


@pytest.mark.parametrize("projection", ["shared", "layerwise"])
def test_a_refresh_is_a_pass_over_the_memory_alone(ids, projection):
    """In the first layer, where nothing but the memory's keys and values is new."""
    memory = MemoryConfig(sources=(2,), residual=False, projection=projection)
    model = build(small(memory, windows="L"))
    refreshed, _, refined = groups_refreshed_and_refined(model, ids)
    for first, other in zip(refreshed, refined, strict=True):
        assert_values_close(first[0], other[0])
        assert np.abs(first[1] - other[1]).max() > 1e-3


def test_a_refresh_leaves_visited_positions_alone(ids):
    model = build(small(MemoryConfig(sources=(2,)), windows="L"))
    refreshed, before, _ = groups_refreshed_and_refined(model, ids, visited=(1, 4))
    for first, other in zip(refreshed, before, strict=True):
        changed = np.abs(first - other).max(axis=(0, 1, 3, 4)) > 0
        assert changed.tolist() == [False, False, True, True, False, True]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_no_order_of_subsets_looks_ahead(ids, order):
    model = build(SHARED)
    partition = cuts(strided_partition(T, 3))
    partition = tuple(partition[i] for i in order)
    changed = ids.copy()
    changed[:, 4] = (ids[:, 4] + 1) % VOCABULARY
    before, after = (merged(model, x, partition) for x in (ids, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert not np.array_equal(before[:, 4:], after[:, 4:])


def test_a_given_partition_is_a_strided_one(ids):
    model, ids = build(SHARED), jnp.asarray(ids)
    given = (np.arange(0, T, 2), np.arange(1, T, 2))

    @quick
    def by_arrays(model):
        passes = interleaved_passes(model, Batch(ids, ids), given)
        return [x for _, x in passes]

    @quick
    def by_slices(model):
        passes = interleaved_passes(model, Batch(ids, ids), strided_partition(T, 2))
        return [x for _, x in passes]

    assert_values_close(by_arrays(model), by_slices(model))


def with_zero(model, *names):
    """Sets the parameters whose names end so to zero."""

    def of_leaf(path, leaf):
        result = any(parameter_name(path).endswith(name) for name in names)
        return jnp.zeros_like(leaf) if result else leaf

    return jax.tree_util.tree_map_with_path(of_leaf, model)


def test_without_entry_refinement_changes_nothing(ids):
    model = with_zero(build(SHARED), "memory_scale", "memory.w_k", "memory.w_v")
    refined = merged(model, ids, cuts(strided_partition(T, 2)))
    assert_values_close(refined, merged(model, ids, ()))


def test_zero_memory_is_the_baseline_only_with_neutral_gates(ids):
    model = build(SHARED)
    tree = to_nested_dict(model)
    plain = build(small(None, value_gate_channels=0))
    tree["stack"].pop("memory")
    for block in tree["stack"]["blocks"].values():
        block.pop("memory_scale"), block.pop("w_mix")
    plain = from_nested_dict(plain, tree)
    baseline, _ = run(plain, ids, plain.init_cache(B, 0))
    neutral = with_zero(model, "w_mix")
    assert_values_close(merged(neutral, ids, ()), baseline)
    assert np.abs(merged(model, ids, ()) - baseline).max() > 1e-3


@pytest.mark.parametrize("memory", ["broadcast", slow("first")])
def test_chunks_of_one_are_exact_and_one_chunk_is_initial(ids, memory):
    model = build(SHARED)

    @partial(quick, static_argnames="chunk")
    def chunked(model, ids, chunk):
        states = Chunked(chunk=chunk, memory=memory).states(model, Batch(ids, ids))
        return model.logits(states)

    exact, _ = run(model, ids, model.init_cache(B, 0))
    assert_values_close(chunked(model, ids, 1), exact)
    assert_values_close(chunked(model, ids, T), merged(model, ids, ()))


@partial(quick, static_argnames="detached")
@partial(jax.grad, argnums=0)
def by_hand(model, batch, detached):
    """Interleaved training with two subsets, its buffer detached or not."""
    stack, tokens = model.stack, Tokens(batch.ids)
    x = model.embed(batch.ids)
    y, buffer = stack.initial(x, tokens)
    means = [token_losses(model, model.final_norm(y), batch.targets).nats.mean()]
    for positions in strided_partition(batch.ids.shape[1], 2):
        if detached:
            buffer = jax.lax.stop_gradient(buffer)
        y, buffer = stack.refine(x, tokens, positions, buffer)
        targets = batch.targets[:, positions]
        means.append(token_losses(model, model.final_norm(y), targets).nats.mean())
    return sum(means) / 3


@pytest.mark.slow
def test_gradients_flow_through_the_buffer(ids):
    model, ids = build(SHARED), jnp.asarray(ids)
    batch = Batch(ids[:, :-1], ids[:, 1:])
    whole = quick(jax.grad(lambda m: Interleaved(subsets=2)(m, batch)[0]))(model)
    assert_gradients_close(by_hand(model, batch, False), whole)
    cut = by_hand(model, batch, True)
    [w_v], [cut_w_v] = (
        [leaf for path, leaf in named(tree) if path.endswith("0.w_v")]
        for tree in (whole, cut)
    )
    assert jnp.abs(w_v - cut_w_v).max() > 1e-2 * jnp.abs(w_v).max()


@pytest.mark.slow
def test_a_batch_in_parts_whose_passes_have_unlike_targets_gives_the_same_step():
    model = build(small(MemoryConfig(sources=(1,)), layers=1, windows="L"))
    ids = jnp.asarray(draw_ids(VOCABULARY, T)[:2])
    # The second part has no target in the second subset.
    targets = ids[:, 1:].at[1, 1::2].set(IGNORED)
    sgd, spikes = optax.sgd(1.0), SpikeConfig(enabled=False)
    options = {"objective": Interleaved(subsets=2), "optimizer": sgd, "spikes": spikes}

    @quick
    def stepped(model):
        state = first_state(model, sgd, spikes)
        batch = Batch(ids[:, :-1], targets)
        return [train_step(state, batch, **options, accumulation=n) for n in (1, 2)]

    (whole, metrics), (parts, of_parts) = stepped(model)
    assert_values_close(of_parts, metrics)
    assert_values_close(parts.model, whole.model)


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(parameter_name(path), leaf) for path, leaf in leaves]


@quick
def swept(model, ids, cache, lengths):
    tokens = Tokens(ids, None, lengths)
    results = []
    for n in (1, T):
        x, after, aux = model.prefill(tokens, cache, by=f"sweeps:{n}")
        (residual,) = aux.values()
        results.append((model.logits(x), after, residual))
    return results


@pytest.mark.sweep
def test_sweeps_end_at_the_exact_recurrence(ids):
    model = build(SHARED)
    lengths = jnp.asarray([T, 4], jnp.int32)
    exact, want = run(model, ids, model.init_cache(B, T + 1), lengths)
    few, all_of_them = swept(model, ids, model.init_cache(B, T + 1), lengths)
    assert few[2] > 1e-2 and all_of_them[2] < 1e-5
    assert_values_close(all_of_them[0][0], exact[0])
    assert_values_close(all_of_them[0][1, :4], exact[1, :4])
    np.testing.assert_array_equal(all_of_them[1].position, want.position)
    assert_values_close(all_of_them[1].states, want.states)


@pytest.mark.slow
def test_sweeps_go_on_from_a_cache_and_forget_at_resets(ids):
    model = build(SWITCHES["keys, averaged lags, reset"])
    exact, _ = run(model, ids, model.init_cache(B, 0))
    _, cache = run(model, ids[:, :4], model.init_cache(B, T))
    rest = jnp.full(B, T - 4, jnp.int32)
    _, (logits, _, _) = swept(model, ids[:, 4:], cache, rest)
    assert_values_close(logits, exact[:, 4:])


def test_a_reset_token_hides_what_came_before_from_the_memory():
    model = build(SWITCHES["keys, averaged lags, reset"])
    ids = jnp.array([[1, 2, 4, RESET, 5, 6, 7, 8, 9]], jnp.int32)
    other = jnp.array([[9, 8, 7, RESET, 5, 6, 7, 8, 9]], jnp.int32)
    memories = [
        model.stack.memory_of(
            jnp.asarray(x, jnp.float32)[..., None] * jnp.ones(8), Tokens(x)
        )
        for x in (ids, other)
    ]
    np.testing.assert_array_equal(memories[0][:, 3:], memories[1][:, 3:])
    assert not np.array_equal(memories[0][:, :3], memories[1][:, :3])


@pytest.mark.parametrize("memory", ["broadcast", slow("first")])
def test_a_reset_token_within_a_chunk_hides_what_came_before_it(memory):
    """Positions behind it in the chunk have the memory of the chunk's first token."""
    model = build(small(MemoryConfig(sources=(1,), reset_token=RESET)))
    ids = np.asarray([[5, 1, 7, 2, RESET, 1]])
    segments = jnp.asarray([[0, 0, 0, 0, 1, 1]])

    @quick
    def states(model, ids):
        return Chunked(chunk=3, memory=memory).states(model, Batch(ids, ids, segments))

    want, other = states(model, ids), states(model, np.where(ids == 7, 8, ids))
    assert np.abs(other[:, 3] - want[:, 3]).max() > 1e-3
    np.testing.assert_array_equal(other[:, 4:], want[:, 4:])


@pytest.mark.parametrize(
    "objective",
    [Interleaved(), Interleaved(refresh=True), slow(Chunked(chunk=4))],
    ids=["interleaved", "refreshed", "chunked"],
)
def test_no_memory_crosses_from_a_document_to_the_next(objective):
    """By the rows' segments alone, without a reset token."""
    model = build(small(MemoryConfig(sources=(1,), lags=(1, 2))))
    ids = np.asarray([[5, 1, 7, 2, 3, 1]])
    segments = jnp.asarray([[0, 0, 0, 1, 1, 1]])

    @quick
    def states(model, ids):
        return objective.states(model, Batch(ids, ids, segments))

    want, other = states(model, ids), states(model, np.where(ids == 7, 8, ids))
    assert np.abs(other[:, 2] - want[:, 2]).max() > 1e-3
    np.testing.assert_array_equal(other[:, 3:], want[:, 3:])
    later = states(model, np.where(ids == 2, 8, ids))
    assert np.abs(later[:, 4] - want[:, 4]).max() > 1e-3


def test_a_reset_token_beyond_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="reset_token must be an id below vocabulary"):
        small(MemoryConfig(sources=(1,), reset_token=VOCABULARY))


@pytest.mark.parametrize(
    ("objective", "model", "message"),
    [
        (Interleaved(), SWITCHES["baseline"], "set model.stack.memory"),
        (Chunked(chunk=2), SWITCHES["baseline"], "set model.stack.memory"),
        (Chunked(chunk=2), SWITCHES["own state"], "lags has 0"),
        (Interleaved(subsets=10), SHARED, "9 tokens .* into 10 subsets"),
        (
            Interleaved(refresh=True),
            small(MemoryConfig(sources=(1,), keys=False, values=False)),
            "nothing can be refreshed",
        ),
    ],
)
def test_what_an_objective_cannot_train_is_told_before(objective, model, message):
    assert re.search(message, objective.refuses(model))
    assert objective.refuses(SWITCHES["averaged sources, replacing"]) is None or (
        objective == Interleaved(subsets=10)
    )


@pytest.mark.parametrize("name", ["baseline", "shared"])
def test_a_prompt_longer_than_its_cache_is_refused(name):
    model = build(SWITCHES[name])
    ids = draw_ids(VOCABULARY, 4)
    with pytest.raises(ValueError, match="4 tokens in one call exceed the cache's"):
        run(model, ids, model.init_cache(B, 3))


def test_a_reset_token_among_pads_forgets_nothing():
    memory = SWITCHES["keys, averaged lags, reset"].stack.memory
    draw = np.random.default_rng(0).standard_normal
    old, new = (jnp.asarray(draw((2, n, 3)), jnp.float32) for n in (3, 5))
    ids = np.array([[1, 2, 4, RESET, 5], [1, RESET, 4, 5, RESET]], np.int32)
    plain = np.where(ids == RESET, 7, ids)
    lengths = jnp.array([3, 5], jnp.int32)
    got = newest(old, new, Tokens(jnp.asarray(ids), lengths=lengths), memory)
    want = newest(old, new, Tokens(jnp.asarray(plain), lengths=lengths), memory)
    # The first row's is a pad: its last three states are what they are without it. The
    # second's are real, and the last of them leaves its own state alone.
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[0], new[0, 2::-1])
    np.testing.assert_array_equal(got[1], [new[1, 4], np.zeros(3), np.zeros(3)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: Interleaved(subsets=T + 1), "parts must be in 1"),
        (
            lambda m: Interleaved(subsets=0),
            r"Interleaved\.subsets: must be >= 1, got 0",
        ),
        (
            lambda m: small(m.config.stack.memory, layers=0),
            r"\.layers: must be >= 1, got 0",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(ids, call, message):
    model = build(SHARED)
    with pytest.raises(ValueError, match=message):
        call(model)(model, Batch(jnp.asarray(ids), jnp.asarray(ids)))


def test_a_buffer_or_memory_of_another_shape_is_refused(ids):
    model, ids = build(SHARED), jnp.asarray(ids)
    x, tokens = model.embed(ids), Tokens(ids)
    buffer = model.stack.empty_buffer(x[:, :4])
    with pytest.raises(ValueError, match="needs a buffer of states"):
        model.stack.refine(x, tokens, slice(0, 1, 1), buffer)
    memory = jnp.zeros((B, 3, 8))
    with pytest.raises(ValueError, match="needs a memory of shape"):
        buffer = model.stack.empty_buffer(x)
        model.stack.refine(x, tokens, slice(0, 1, 1), buffer, memory=memory)


def test_a_refresh_wants_origins_and_keys_or_values(ids):
    ids = jnp.asarray(ids)
    tokens = Tokens(ids)
    model = build(SHARED)
    _, buffer = model.stack.initial(model.embed(ids), tokens)
    visited = jnp.zeros(T, bool)
    with pytest.raises(ValueError, match="origins=True"):
        model.stack.refreshed(buffer, tokens, visited=visited)
    bare = build(small(MemoryConfig(sources=(1,), keys=False, values=False)))
    _, buffer = bare.stack.initial(bare.embed(ids), tokens, origins=True)
    with pytest.raises(ValueError, match="no key and no value takes the memory"):
        bare.stack.refreshed(buffer, tokens, visited=visited)


def test_a_source_outside_the_layers_or_named_twice_is_refused():
    with pytest.raises(ValueError, match=r"memory.sources must be layers in 1..2"):
        small(MemoryConfig(sources=(3,)))
    with pytest.raises(
        ValueError, match=r"sources must differ from each other, got \(2, 2\)"
    ):
        MemoryConfig(sources=(2, 2))
