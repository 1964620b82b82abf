"""Steps that continue the rows of the last one: the cache they carry, its border."""

import dataclasses
import io
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from recurjax.data.config import (
    Bytes,
    DataConfig,
    EmbeddedText,
    Mixture,
    Part,
    Reweighting,
)
from recurjax.data.dataset import open_dataset
from recurjax.data.loader import CarriedBatches
from recurjax.data.streams import MemoryStream
from recurjax.data.tasks.dataset import TaskData
from recurjax.data.tasks.mqar import Mqar
from recurjax.errors import UserError
from recurjax.layers.position import LearnedPositions
from recurjax.losses.cross_entropy import token_losses
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training import loop
from recurjax.training import session as session_module
from recurjax.training.loop import Interruption
from recurjax.training.objective import Compress, NextToken
from recurjax.training.program import build_step
from recurjax.training.session import Session
from recurjax.training.spikes import SpikeConfig
from recurjax.training.step import first_state, train_step
from recurjax.types import Batch
from recurjax.variants.latent_recurrent_transformer.objectives import (
    Chunked,
    Interleaved,
)
from tests.marks import slow_except
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.training.run_contents import arrays, assert_same_run
from tests.training.tiny_experiment import changed, config
from tests.variants.latent_recurrent_transformer import switches as lrt
from tests.variants.rat import switches as rat
from tests.variants.recurformer import switches as recurformer
from tests.variants.recurrent_transformer import switches as rt
from tests.variants.relaxed_recursive_transformer import switches as rrt
from tests.variants.transformer import switches as transformer

pytestmark = pytest.mark.usefixtures("quick_compilation")
T, B, CARRY = 4, 4, 2
ONE_PASS = NextToken()
MODELS = {
    "rt": (transformer.build, rt.SWITCHES["the_paper"], ONE_PASS),
    "rt, wavefront": (
        transformer.build,
        rt.SWITCHES["grouped_rope_layer_norm_biases_wavefront"],
        ONE_PASS,
    ),
    "lrt": (lrt.build, lrt.SWITCHES["shared"], ONE_PASS),
    "lrt, chunks": (lrt.build, lrt.SWITCHES["shared"], Chunked(chunk=2)),
    "lrt, chunks, reset": (
        lrt.build,
        lrt.SWITCHES["keys, averaged lags, reset"],
        Chunked(chunk=2, memory="first"),
    ),
    "rat": (rat.build, rat.SWITCHES["rat"], ONE_PASS),
    "rat beside windows": (
        rat.build,
        rat.SWITCHES["low_rank_by_token_beside_windows"],
        ONE_PASS,
    ),
    "rat reversed": (rat.build, rat.SWITCHES["reversed"], ONE_PASS),
    "rnn": (rat.build, rat.SWITCHES["rnn"], ONE_PASS),
    "rat, mamba and rt": (rat.build, rat.small(rat.rat(), rat.MAMBA, rat.RT), ONE_PASS),
    "mamba": (
        recurformer.build,
        recurformer.small(((0, 1, 2, 3),) * 2),
        ONE_PASS,
    ),
    "recurformer": (
        recurformer.build,
        recurformer.SWITCHES["ragged_groups"],
        ONE_PASS,
    ),
    "rrt": (
        transformer.build,
        rrt.SWITCHES["cycle, untied, rank 3, rings"],
        ONE_PASS,
    ),
    "transformer": (
        transformer.build,
        transformer.SWITCHES["rope_grouped_ring"],
        ONE_PASS,
    ),
}
QUICK = ("rt", "lrt, chunks", "rat")


class LongRows:
    """Batches of random rows of `length` tokens, from `first` on, with a place."""

    def __init__(self, vocabulary: int, length: int, *, first: int = 0):
        self.vocabulary, self.length = vocabulary, length
        self.first, self.at = first, 0

    def __next__(self):
        batch = self.read(self.at)
        self.at += 1
        return {name: rows[self.first :] for name, rows in batch.items()}

    def read(self, number: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(number)
        tokens = draw.integers(self.vocabulary, size=(B, self.length + 1))
        tokens = tokens.astype(np.int32)
        return {"ids": tokens[:, :-1], "targets": tokens[:, 1:]}

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def as_batch(rows) -> Batch:
    return Batch(jnp.asarray(rows["ids"]), jnp.asarray(rows["targets"]))


def start(model, *, carry=CARRY, parts=1, rate=0.0, spikes=None, train_only=None):
    """Returns the first state of a model with plain gradient descent, and its step."""
    cache = model.init_cache(B // parts, carry * T)
    cache = jax.tree.map(lambda x: jnp.zeros((parts, *x.shape), x.dtype), cache)
    optimizer, spikes = optax.sgd(rate), spikes or SpikeConfig(enabled=False)
    state = first_state(model, optimizer, spikes, train_only, cache)
    options = {"spikes": spikes, "train_only": train_only, "accumulation": parts}
    return state, partial(train_step, optimizer=optimizer, carry=carry, **options)


@pytest.mark.parametrize("name", slow_except(QUICK, MODELS, slow=()))
def test_steps_of_a_frozen_model_have_the_losses_of_the_long_rows(name):
    build, model, objective = MODELS[name]
    model, rows = build(model), LongRows(model.vocabulary, CARRY * T)

    @jax.jit
    def nats(model, batch):
        x = objective.states(model, batch)
        return token_losses(model, x, batch.targets).nats

    long = np.stack([nats(model, as_batch(rows.read(n))) for n in range(3)])
    # [rows, pieces of the three batches, T]
    pieces = long.swapaxes(0, 1).reshape(B, 3 * CARRY, T).mean(axis=2)
    state, step = start(model)
    step = jax.jit(partial(step, objective=objective.carry))
    carried = CarriedBatches(rows, CARRY)
    # Odd rows begin in their middle at step 0, without what is before.
    for number in range(4):
        state, metrics = step(state, as_batch(next(carried)))
        at = number + np.arange(B) % CARRY
        if number > 0:
            want = pieces[np.arange(B), at].mean()
            np.testing.assert_allclose(metrics["loss"], want, rtol=2e-5)


@pytest.fixture(scope="module")
def rnn(quick_compilation):
    return rat.build(rat.SWITCHES["rnn"])


def two_batches(model) -> list[Batch]:
    carried = CarriedBatches(LongRows(model.config.vocabulary, CARRY * T), CARRY)
    return [as_batch(next(carried)) for _ in range(2)]


@pytest.mark.parametrize("train_only", [None, "mixer"])
def test_gradients_stop_where_a_step_begins(rnn, train_only):
    first, second = two_batches(rnn)
    before, step = start(rnn, rate=1.0, train_only=train_only)
    step = jax.jit(partial(step, objective=ONE_PASS.carry))
    before, _ = step(before, first)
    after, _ = step(before, second)
    moved = jax.tree.map(jnp.subtract, before.model, after.model)

    def loss(model, cache):
        # Odd rows begin at step 1.
        cache = model.stack.reset(cache, jnp.arange(B) % 2 == 1)
        return ONE_PASS.carry(model, second, cache)[0]

    def through_both(model):
        _, (_, cache) = ONE_PASS.carry(model, first, model.init_cache(B, CARRY * T))
        return loss(model, cache)

    cache = jax.tree.map(lambda x: x[0], before.cache)
    want = jax.jit(jax.grad(loss))(before.model, cache)
    if train_only is not None:
        assert not np.any(moved.w_embedding[...])
        moved, want = moved.stack.blocks[0].mixer, want.stack.blocks[0].mixer
        assert_gradients_close(moved, want)
        return
    assert_gradients_close(moved, want)
    whole = jax.jit(jax.grad(through_both))(before.model)
    gate = lambda tree: np.asarray(tree.stack.blocks[0].mixer.w_v[...])  # noqa: E731
    assert np.abs(gate(whole) - gate(want)).max() > 1e-3 * np.abs(gate(want)).max()


def test_a_batch_in_parts_carries_the_same_rows(rnn):
    states = []
    for parts in (1, 2):
        state, step = start(rnn, parts=parts, rate=0.1)
        step = jax.jit(partial(step, objective=ONE_PASS.carry))
        for batch in two_batches(rnn):
            state, _ = step(state, batch)
        states.append(state)
    whole, halves = states
    assert_values_close(halves.model, whole.model)
    # Part a has the rows a and a + 2.
    [group] = halves.cache.groups
    [want] = whole.cache.groups
    rows = np.asarray(group.state)[[0, 1, 0, 1], :, [0, 0, 1, 1]]
    assert_values_close(rows, np.asarray(want.state)[0].swapaxes(0, 1))


def test_a_skipped_step_leaves_the_cache_of_the_rows_that_go_on(rnn):
    def poisoned(model, batch, cache):
        loss, (metrics, cache) = ONE_PASS.carry(model, batch, cache)
        bad = jnp.where(batch.ids[0, 0] < 0, jnp.nan, 1.0)
        cache = jax.tree.map(lambda x: x * bad.astype(x.dtype), cache)
        return loss * bad, ({"loss": loss * bad}, cache)

    first, second = two_batches(rnn)
    second = second._replace(ids=second.ids.at[0, 0].set(-1))
    state, step = start(rnn, rate=1.0, spikes=SpikeConfig(window=4))
    step = jax.jit(partial(step, objective=poisoned))
    before, _ = step(state, first)
    after, metrics = step(before, second)
    assert int(metrics["skipped"]) == 1 and int(after.step) == 2
    [old], [new] = before.cache.groups, after.cache.groups
    even, odd = slice(0, None, 2), slice(1, None, 2)
    np.testing.assert_array_equal(new.state[0, :, even], old.state[0, :, even])
    assert np.any(old.state[0, :, odd]) and not np.any(new.state[0, :, odd])
    np.testing.assert_array_equal(after.cache.position, [[T, 0, T, 0]])


def test_a_row_goes_on_until_its_end_and_each_step_has_all_pieces():
    pieces, rows = 4, LongRows(1000, 4 * T)
    carried = CarriedBatches(rows, pieces)
    steps = [next(carried) for _ in range(3 * pieces)]
    for row in range(B):
        # Whoever begins in the middle of batch 0 goes on to its end.
        ids = np.concatenate([step["ids"][row] for step in steps])
        long = np.concatenate([rows.read(n)["ids"][row] for n in range(4)])
        skipped = row % pieces * T
        np.testing.assert_array_equal(ids, long[skipped : skipped + len(ids)])
    for old, new in pairwise(steps):
        goes_on = old["targets"][:, -1] == new["ids"][:, 0]
        assert goes_on.sum() == B - B // pieces


def test_a_place_in_the_pieces_serves_any_division_of_the_rows():
    carried = CarriedBatches(LongRows(1000, 3 * T), 3)
    for _ in range(4):
        next(carried)
    state = carried.get_state()
    want = [next(carried) for _ in range(5)]
    assert state["piece"] == 1
    other = CarriedBatches(LongRows(1000, 3 * T, first=1), 3, first=1)
    other.set_state(state)
    for batch in want:
        got = next(other)
        for name in batch:
            np.testing.assert_array_equal(got[name], batch[name][1:])
    assert other.get_state() == carried.get_state()


def test_every_token_of_a_split_is_read_once_an_epoch():
    pieces, epoch, text = 3, 2, DataConfig(corpus=EmbeddedText(), tokenizer=Bytes())
    places = np.arange(epoch * B * pieces * T + 1)
    stream = MemoryStream([places], vocabulary=len(places))
    dataset = dataclasses.replace(
        open_dataset(text), stream=stream, cut=stream.tokens, config=text
    )
    batches = iter(dataset.loader("train", length=pieces * T, batch=B))
    carried = CarriedBatches(batches, pieces)
    steps = [next(carried) for _ in range(3 * epoch * pieces)]
    carried.close()
    read = []
    for row in range(B):
        # The second epoch of a row that began with its first row's piece row mod 3.
        first = epoch * pieces - row % pieces
        read += [step["ids"][row] for step in steps[first : first + epoch * pieces]]
    np.testing.assert_array_equal(np.sort(np.concatenate(read)), places[:-1])


def carrying(**training):
    """The tiny experiment with an RNN that carries its state over three steps."""
    model = dataclasses.replace(rat.SWITCHES["rnn"], vocabulary=257)
    tiny = dataclasses.replace(config(), model=model)
    return changed(tiny, training={"carry": 3, **training})


def train(root, *, stop_at_poll=None):
    """Trains; a signal comes just before the loop asks for the nth time."""

    class Signalled(Interruption):
        polls = 0

        def requested(self):
            self.polls += 1
            if self.polls == stop_at_poll:
                self.stop = "terminate"
            return super().requested()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Interruption", Signalled)
        console = Console(file=io.StringIO(), width=200)
        return loop.train(carrying(), root, console=console)


@pytest.mark.slow
def test_a_run_killed_inside_its_rows_goes_on_bit_for_bit(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole)
    # In the middle of a row, after the evaluation of step 4, and in another middle.
    for poll, step in ((3, 2), (3, 4), (6, 7)):
        assert train(stopped, stop_at_poll=poll).step == step
    _, saved = arrays(stopped)
    assert np.any(saved["cache.groups.0.state"])
    # Rows 0, 3 and 6 of 8 begin at step 6; the last step read 16 tokens more.
    assert saved["cache.position"].tolist() == [[16, 32, 48, 16, 32, 48, 16, 32]]
    train(stopped)
    assert_same_run(stopped, whole)


def first_steps(experiment, root, monkeypatch, devices):
    monkeypatch.setattr(
        session_module,
        "make_mesh",
        lambda config: make_mesh(config, jax.devices()[:devices]),
    )
    session = Session(experiment, root)
    state, losses = session.start(print), []
    try:
        for _ in range(4):
            state, metrics = session.step(state)
            losses.append(float(metrics["loss"]))
    finally:
        session.close()
    return losses, state


@pytest.mark.sweep
@pytest.mark.parametrize("accumulation", [1, 2])
def test_sharded_rows_carry_the_same_cache(accumulation, tmp_path, monkeypatch):
    one = carrying()
    want, alone = first_steps(one, tmp_path / "one", monkeypatch, 1)
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    many = dataclasses.replace(carrying(accumulation=accumulation), mesh=mesh)
    got, state = first_steps(many, tmp_path / "many", monkeypatch, 8)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    held, expected = state.cache.groups[0].state, alone.cache.groups[0].state
    # Each device holds a quarter of the rows: `data` and `fsdp` cut them.
    assert held.addressable_shards[0].data.shape[2] * 4 * accumulation == 8
    parts = np.asarray(held).transpose(2, 0, 1, 3).reshape(8, *held.shape[1:2], -1)
    assert_values_close(parts, np.asarray(expected)[0].swapaxes(0, 1))


@pytest.mark.slow
def test_adapters_carry_the_cache_of_their_model(tmp_path):
    base = tmp_path / "base"
    console = Console(file=io.StringIO(), width=200)
    short = changed(carrying(), training={"steps": 2}, evaluation={"every": 0})
    loop.train(short, base, console=console)
    tuned = changed(
        carrying(), training={"adapters": "lora:2:4:v", "start_from": str(base)}
    )
    state, losses = None, []
    session = Session(tuned, tmp_path / "tuned")
    try:
        state = session.start(print)
        for _ in range(2):
            state, metrics = session.step(state)
            losses.append(float(metrics["loss"]))
    finally:
        session.close()
    assert np.all(np.isfinite(losses)) and np.any(state.cache.groups[0].state)
    assert state.cache.position.tolist() == [[32, 32, 16, 32, 32, 16, 32, 32]]


def mixture() -> Mixture:
    parts = tuple(Part(corpus=EmbeddedText(), weight=1.0, name=n) for n in "ab")
    change = Reweighting(step=4, weights=(1.0, 0.0))
    return Mixture(parts=parts, reweightings=(change,))


def test_each_mistake_is_one_sentence():
    good, tiny = carrying(), config()
    needs = "training.carry needs an objective of one pass, NextToken or Chunked"
    with pytest.raises(ValueError, match=f"^{needs}, got Compress$"):
        row_decoder = dataclasses.replace(good.model, row_decoder=True)
        dataclasses.replace(good, model=row_decoder, objective=Compress())
    with pytest.raises(ValueError, match=f"^{needs}, got Interleaved$"):
        stack = dataclasses.replace(lrt.SWITCHES["shared"].stack, length=16)
        dataclasses.replace(
            changed(good, training={"length": 16}),
            model=dataclasses.replace(lrt.SWITCHES["shared"], stack=stack),
            objective=Interleaved(),
        )
    with pytest.raises(ValueError, match="^training.carry continues rows with a cache"):
        changed(good, data={"document_segments": True})
    with pytest.raises(ValueError, match="cannot change by the step: leave out a mix"):
        changed(good, data={"corpus": mixture()})
    turns = TaskData(task=Mqar(), order="settings")
    with pytest.raises(ValueError, match="data.stages and data.order settings$"):
        dataclasses.replace(good, data=turns)
    position = LearnedPositions(length=40)
    attention = dataclasses.replace(tiny.model.stack.attention, position=position)
    stack = dataclasses.replace(tiny.model.stack, attention=attention)
    short = changed(tiny, model={"stack": stack})
    what = r"^training.length 16 x training.carry 3 = 48 exceeds the model's 40 learned"
    with pytest.raises(ValueError, match=what):
        changed(short, training={"carry": 3})
    mesh = make_mesh(MeshConfig(data=1, sequence=2), jax.devices()[:2])
    with pytest.raises(UserError, match="^training.carry continues entire rows, and"):
        build_step(good, mesh)
