"""The laws of the stack protocol: every variant's test file inherits all of them.

    class TestLaws(StackLaws):
        models = SWITCHES
        build = staticmethod(build)

To compile takes nearly all the time, so the laws share four programs a model: the full
row in training, with documents and without, and on a cache a piece of `PIECE` tokens,
of which `lengths` are real, and a single token. A new law should do with these.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.model import Decoder, ModelConfig
from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close, assert_values_close

B, T = 2, 13
PIECE = 9
"""Longer than two chunks, tiles or small windows of the variants' models."""
quick = partial(jax.jit, compiler_options=QUICK_COMPILE)


@quick
def apply(model, tokens, cache):
    return model(tokens, cache)


def run(model, ids, cache, lengths=None, segments=None):
    """Returns logits as numpy does: slices of them are not compiled."""
    logits, cache = apply(model, tokens_of(ids, segments, lengths), cache)
    return np.asarray(logits), cache


def tokens_of(*arrays) -> Tokens:
    """Made by numpy: jax compiles what it makes."""
    integers = [x if x is None else np.asarray(x, np.int32) for x in arrays]
    return Tokens(*jax.device_put(integers))


def in_pieces(model, ids, pieces):
    """Returns the logits of rows read in pieces, and the cache after them.

    A piece of more than one token is padded to `PIECE`, so that all are one program.
    """
    cache, start, parts = model.init_cache(len(ids), ids.shape[1]), 0, []
    for piece in pieces:
        padding = PIECE - piece if piece > 1 else 0
        given = np.pad(ids[:, start : start + piece], ((0, 0), (0, padding)))
        logits, cache = run(model, given, cache, [piece] * len(ids))
        parts.append(logits[:, :piece])
        start += piece
    assert start == ids.shape[1]
    return np.concatenate(parts, axis=1), cache


def draw_ids(vocabulary: int, length: int = T) -> np.ndarray:
    draw = np.random.default_rng(1)
    return draw.integers(vocabulary, size=(B, length), dtype=np.int32)


def with_dtype(model: Decoder, build, dtype: str) -> Decoder:
    """The same float32 weights in a model that computes in another dtype."""
    config = dataclasses.replace(model.config, dtype=dtype)
    like = jax.eval_shape(lambda: build(config))
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(model))


_build_once = cache(lambda build, config: build(config))


@quick
def pull_back(model, ids, weights):
    """Returns gradients of sum(h * weights) by the stack's weights and its input."""

    def hidden(stack, x):
        return stack(x, stack.init_cache(len(ids), 0, x.dtype), Tokens(ids))[0]

    _, pull = jax.vjp(hidden, model.stack, model.embed(ids))
    return pull(weights)


@quick
def reset(model, cache, rows):
    return model.stack.reset(cache, rows)


@quick
def insert(model, cache, row, other):
    return model.stack.insert(cache, row, other)


@quick
def take(model, cache, rows):
    return model.stack.take(cache, rows)


def row_of(model, cache, row: int):
    """Returns the cache of one row; its axis is the one that grows with the batch."""

    def cut(one, two, leaf):
        axes = np.flatnonzero(np.not_equal(one.shape, two.shape))
        return np.take(leaf, [row], *axes) if len(axes) else leaf

    sizes = [jax.eval_shape(lambda b=b: model.init_cache(b, 4)) for b in (1, 2)]
    return jax.tree.map(cut, *sizes, jax.device_get(cache))


@quick
def pull_back_through_a_cache(model, ids, weights):
    """Returns the same, with the row read in two pieces that a cache joins."""

    def hidden(stack, x):
        cache, half, parts = stack.init_cache(*ids.shape, x.dtype), T // 2, []
        for piece in (slice(half), slice(half, None)):
            h, cache = stack(x[:, piece], cache, Tokens(ids[:, piece]))
            parts.append(h)
        return jnp.concatenate(parts, axis=1)

    _, pull = jax.vjp(hidden, model.stack, model.embed(ids))
    return pull(weights)


class StackLaws:
    """Every law for each of `models`, which are named by what they switch on.

    Attributes:
      models: configs by name; ids are drawn below their vocabulary.
      build: makes a model with all weights away from their neutral start.
      slow: names that `make test-slow` runs.
      rare: names that are a sweep.
      first: the name for which `make test` also compiles what a law needs for itself
        (`own_program`: gradients, another dtype); those of `slow` names are a sweep,
        and of all others where a law is `own_program(dear=True)`.
    """

    models: Mapping[str, ModelConfig]
    build: Callable[[ModelConfig], Decoder]
    slow: frozenset[str] = frozenset()
    rare: frozenset[str] = frozenset()
    first: str

    def documents(self, config: ModelConfig) -> int | None:
        """Returns where documents of a row may start to be as they are alone.

        At each multiple of the number returned; 0: at none, for positions count from
        the row's start. None: the model takes no documents.
        """
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc):
        if "switch" in metafunc.fixturenames:
            own = metafunc.definition.get_closest_marker("own_program")

            def marks(name: str) -> list[pytest.MarkDecorator]:
                if name in self.rare:
                    return [pytest.mark.sweep]
                if own is None:
                    return [pytest.mark.slow] if name in self.slow else []
                if name == self.first:
                    return []
                rare = name in self.slow or own.kwargs.get("dear", False)
                return [pytest.mark.sweep if rare else pytest.mark.slow]

            names = [pytest.param(name, marks=marks(name)) for name in self.models]
            # The scope brings all laws of a model together.
            metafunc.parametrize("switch", names, scope="class")

    @pytest.fixture
    def model(self, switch):
        return _build_once(type(self).build, self.models[switch])

    @pytest.fixture
    def ids(self, model):
        return draw_ids(model.config.vocabulary)

    @pytest.fixture
    def whole(self, model, ids):
        return run(model, ids, model.init_cache(B, 0))[0]

    def test_logits_leave_out_the_padded_vocabulary(self, model, whole):
        assert whole.shape == (B, T, model.config.vocabulary)
        assert whole.dtype == jnp.float32
        assert np.all(np.isfinite(whole))

    def test_future_does_not_leak_into_the_past(self, model, ids, whole):
        changed = ids.copy()
        changed[:, 8] = (ids[:, 8] + 1) % model.config.vocabulary
        other, _ = run(model, changed, model.init_cache(B, 0))
        np.testing.assert_array_equal(other[:, :8], whole[:, :8])
        assert np.all(np.any(other[:, 8:] != whole[:, 8:], axis=-1))

    @pytest.mark.own_program(dear=True)
    def test_the_states_of_its_layers_end_in_the_whole(self, model, ids, whole):
        tokens = tokens_of(ids)
        states = list(model.stack.layer_states(model.embed(tokens.ids), tokens))
        assert len(states) == model.config.stack.layers + 1
        logits = model.logits(model.final_norm(states[-1]))
        assert_values_close(np.asarray(logits), whole)

    def test_batch_rows_do_not_mix(self, model, ids, whole):
        changed = np.stack([ids[0], (ids[1] + 1) % model.config.vocabulary])
        other, _ = run(model, changed, model.init_cache(B, 0))
        np.testing.assert_array_equal(other[0], whole[0])
        assert np.all(np.any(other[1] != whole[1], axis=-1))

    @pytest.mark.own_program
    def test_gradients_are_finite_and_flow_from_the_past_and_the_own_row(
        self, model, ids
    ):
        width = model.config.stack.width
        weights = np.zeros((B, T, width), np.float32)
        weights[0, 8] = np.random.default_rng(2).normal(size=width)
        for_stack, for_x = jax.device_get(pull_back(model, ids, weights))
        for leaf in (for_x, *jax.tree.leaves(for_stack)):
            assert np.all(np.isfinite(leaf))
        np.testing.assert_array_equal(for_x[:, 9:], 0)
        np.testing.assert_array_equal(for_x[1], 0)
        assert np.any(for_x[0, 8]) and np.any(for_x[0, 7])

    @pytest.mark.own_program(dear=True)
    def test_gradients_pass_through_a_cache(self, model, ids):
        width = model.config.stack.width
        weights = np.zeros((B, T, width), np.float32)
        weights[:, -3:] = np.random.default_rng(2).normal(size=(B, 3, width))
        got = jax.device_get(pull_back_through_a_cache(model, ids, weights))
        assert_gradients_close(got, jax.device_get(pull_back(model, ids, weights)))

    def test_the_training_cache_keeps_nothing(self, model, ids):
        before = model.init_cache(B, 0)
        _, after = run(model, ids, before)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, before)

    @pytest.mark.own_program(dear=True)
    def test_prefill_of_whole_rows_equals_training(self, model, ids, whole):
        """Without `lengths`, in one call; with them it is among the cuts below."""
        prefilled, _ = run(model, ids, model.init_cache(B, T))
        assert_values_close(prefilled, whole)

    @pytest.mark.parametrize(
        "pieces",
        [(1,) * T, (PIECE, 1, 1, 1, 1), (5, 1, 1, 5, 1), (1, 4, 8)],
        ids=["steps", "prefill", "5+1+1+5+1", "1+4+8"],
    )
    def test_any_cut_equals_the_whole(self, model, ids, whole, pieces):
        assert_values_close(in_pieces(model, ids, pieces)[0], whole)

    def test_ragged_rows_stand_at_their_own_positions(self, model, ids, whole):
        """Rows go on by their own lengths; pads would overwrite rings if they could."""
        cache = model.init_cache(B, T)
        seen = np.zeros(B, int)
        for lengths in ([5, 2], [2, 9], [5, 0], [1, 1]):
            offset = np.arange(PIECE)
            real = offset < np.asarray(lengths)[:, None]
            at = np.where(real, np.minimum(seen[:, None] + offset, T - 1), 0)
            piece = np.where(real, np.take_along_axis(ids, at, axis=1), 3)
            logits, cache = run(model, piece, cache, lengths)
            for row, count in enumerate(lengths):
                wanted = whole[row, seen[row] : seen[row] + count]
                assert_values_close(logits[row, :count], wanted)
            seen += lengths
        assert list(seen) == [T, T - 1]

    def test_what_pads_hold_changes_nothing(self, model, ids):
        lengths = [PIECE, 2]
        other = ids[:, :PIECE].copy()
        other[1, 2:] = (other[1, 2:] + 1) % model.config.vocabulary
        results = []
        for piece in (ids[:, :PIECE], other):
            logits, cache = run(model, piece, model.init_cache(B, T), lengths)
            results.append((logits[0], logits[1, :2], cache))
        chex.assert_trees_all_equal(*results)

    @pytest.mark.parametrize("length", [1, PIECE])
    def test_a_row_of_no_tokens_stays_as_it_is(self, model, ids, length):
        before = run(model, ids[:, :PIECE], model.init_cache(B, T), [5, PIECE])[1]
        following = ids[:, T - length :]
        logits, after = run(model, following, before, [0] * B)
        chex.assert_trees_all_equal(after, before)
        assert np.all(np.isfinite(logits))

    def test_a_reset_row_equals_a_fresh_one(self, model, ids):
        _, cache = run(model, ids[:, :PIECE], model.init_cache(B, T), [PIECE] * B)
        emptied = reset(model, cache, np.asarray([False, True]))
        fresh = model.init_cache(B, T)
        for row, same in ((1, fresh), (0, cache)):
            chex.assert_trees_all_equal(
                row_of(model, emptied, row), row_of(model, same, row)
            )
        with pytest.raises(AssertionError):
            chex.assert_trees_all_equal(emptied, cache)
        # What follows in it is what follows from nothing; its neighbour goes on.
        following = ids[:, T - 1 :]
        got, from_nothing, on = (
            run(model, following, cache, [1] * B)[0]
            for cache in (emptied, fresh, cache)
        )
        np.testing.assert_array_equal(got[1], from_nothing[1])
        np.testing.assert_array_equal(got[0], on[0])

    def test_an_inserted_row_goes_on_as_it_did_alone(self, model, ids):
        """Rows do not mix: next to any neighbour is as alone."""
        first, following = ids[:, :PIECE], ids[:, T - 1 :]
        other = (first + 1) % model.config.vocabulary
        _, cache = run(model, first, model.init_cache(B, T), [PIECE] * B)
        _, donor = run(model, other, model.init_cache(B, T), [5, PIECE])
        mixed = insert(model, cache, np.int32(1), row_of(model, donor, 0))
        got, of_cache, of_donor = (
            run(model, following[[0, 0]], cache, [1] * B)[0]
            for cache in (mixed, cache, donor)
        )
        np.testing.assert_array_equal(got[0], of_cache[0])
        np.testing.assert_array_equal(got[1], of_donor[0])
        assert not np.array_equal(got[1], of_cache[1])

    def test_more_than_one_row_is_not_inserted(self, model):
        with pytest.raises(ValueError, match="a cache of one row"):
            cache = model.init_cache(B, T)
            model.stack.insert(cache, 0, cache)

    def test_rows_taken_go_on_as_the_rows_they_were(self, model, ids):
        """In another order, or one of them twice."""
        _, cache = run(model, ids[:, :PIECE], model.init_cache(B, T), [5, PIECE])
        following = ids[[0, 0], T - 1 :]
        want, _ = run(model, following, cache, [1] * B)
        for rows in ([1, 0], [1, 1]):
            taken = take(model, cache, np.asarray(rows))
            got, _ = run(model, following, taken, [1] * B)
            np.testing.assert_array_equal(got, want[rows])

    def test_packed_documents_do_not_see_each_other(self, model, ids):
        """Changing the first leaves the second as it was, wherever the cut falls."""
        self.skip_without_documents(model)
        segments = np.asarray([[0] * 6 + [1] * 7, [0] * 8 + [1] * 5])
        cache = model.init_cache(B, 0)
        packed, _ = run(model, ids, cache, segments=segments)
        changed = np.where(segments == 0, (ids + 1) % model.config.vocabulary, ids)
        other, _ = run(model, changed, cache, segments=segments)
        np.testing.assert_array_equal(other[segments == 1], packed[segments == 1])
        assert np.all(np.any(other != packed, axis=-1)[segments == 0])
        together, _ = run(model, ids, cache, segments=np.zeros_like(ids))
        assert not np.allclose(together[0, 6:], packed[0, 6:], atol=1e-3)

    def test_a_packed_document_is_as_it_is_alone(self, model, ids, whole):
        """Its distances alone count, if it starts where the variant's chunks do."""
        self.skip_without_documents(model)
        together, _ = run(
            model, ids, model.init_cache(B, 0), segments=np.zeros_like(ids)
        )
        assert_values_close(together, whole)
        every = self.documents(model.config)
        if not every:
            return
        start = -(-5 // every) * every
        assert start < T - 1
        packed = np.concatenate([ids[::-1, :start], ids[:, : T - start]], axis=1)
        segments = np.repeat([[0] * start + [1] * (T - start)], B, axis=0)
        logits, _ = run(model, packed, model.init_cache(B, 0), segments=segments)
        assert_values_close(logits[:, start:], whole[:, : T - start])

    def test_documents_are_for_training_only(self, model, ids):
        length = T if self.documents(model.config) is not None else 0
        tokens = tokens_of(ids, np.zeros_like(ids))
        with pytest.raises(NotImplementedError, match="segments"):
            jax.eval_shape(lambda: model(tokens, model.init_cache(B, length)))

    def skip_without_documents(self, model) -> None:
        if self.documents(model.config) is None:
            pytest.skip("packed rows are refused: see documents_are_for_training_only")

    @pytest.fixture
    def exact(self):
        """The model `first`, its ids and its logits in training."""
        model = _build_once(type(self).build, self.models[self.first])
        ids = draw_ids(model.config.vocabulary)
        return model, ids, run(model, ids, model.init_cache(B, 0))[0]

    @pytest.mark.slow
    def test_float64_is_float32_with_more_digits(self, exact):
        model, ids, narrow = exact
        with jax.enable_x64(True):
            wide = with_dtype(model, type(self).build, "float64")
            whole, _ = run(wide, ids, wide.init_cache(B, 0))
            assert whole.dtype == np.float64
            assert_values_close(narrow, whole)
            parts, _ = in_pieces(wide, ids, (5, 1, 1, 5, 1))
            assert_values_close(parts, whole, "float64")

    def test_bfloat16_costs_little_more_than_rounding_the_weights(self, exact):
        model, ids, want = exact
        rounded = jax.tree.map(round_to_bfloat16, model)
        best, _ = run(rounded, ids, rounded.init_cache(B, 0))
        narrow = with_dtype(model, type(self).build, "bfloat16")
        logits, _ = run(narrow, ids, narrow.init_cache(B, T))
        assert logits.dtype == np.float32
        size = np.linalg.norm(want)
        error = np.linalg.norm(logits - want) / size
        assert 0 < error < 4 * np.linalg.norm(best - want) / size
        assert error < 0.05


def round_to_bfloat16(weight):
    return np.asarray(weight).astype(jnp.bfloat16).astype(np.float32)
