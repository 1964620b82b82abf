"""Rows cut over devices give what one device does; errors name what cannot be cut."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.layers.position import Alibi
from recurjax.sharding import MeshConfig, batch_sharding, make_mesh, shardings
from recurjax.training import session as session_module
from recurjax.training.session import Session
from recurjax.types import Tokens
from recurjax.variants.rat import RnnMixerConfig, presets
from recurjax.variants.rat.sequence_parallel import obstacle
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.training.tiny_experiment import changed, config
from tests.variants.rat.switches import (
    HEADS,
    RT,
    SWITCHES,
    VOCABULARY,
    WIDTH,
    WINDOW,
    build,
    rat,
    small,
)

BATCH, LENGTH = 2, 32
RNN = RnnMixerConfig(heads=HEADS, head_width=4, gate_horizon=LENGTH)
FULL = presets.attention(width=WIDTH, heads=HEADS)
ALL = small(RNN, rat(), WINDOW, FULL, layers=4)
"""Every mixer that can be cut, one layer each."""
SEGMENTS = np.asarray([[0] * 13 + [1] * 19, [0] * 22 + [1] * 10], np.int32)


@pytest.fixture(scope="module")
def ids():
    draw = np.random.default_rng(1)
    return draw.integers(VOCABULARY, size=(BATCH, LENGTH), dtype=np.int32)


@partial(jax.jit, compiler_options=QUICK_COMPILE)
@partial(jax.value_and_grad, has_aux=True)
def loss(model, ids, segments):
    logits, _ = model(Tokens(ids, segments), model.init_cache(BATCH, 0))
    return jnp.sum(jnp.square(jax.nn.log_softmax(logits))), logits


def on_mesh(mesh, model, ids, segments):
    with jax.set_mesh(mesh):
        rows = jax.device_put((ids, segments), batch_sharding(mesh))
        return loss(jax.device_put(model, shardings(model, mesh)), *rows)


@pytest.fixture(scope="module")
def whole(ids):
    """On one device: loss, logits and gradients, with and without documents."""
    done = {}

    def get(config, segments):
        key = config, segments is None
        if key not in done:
            done[key] = loss(build(config), jnp.asarray(ids), segments)
        return done[key]

    return get


CUTS = [
    ({"data": 2, "sequence": 4}, small(RNN, rat(), layers=2), SEGMENTS),
    ({"data": 2, "sequence": 4}, ALL, SEGMENTS),
    *[
        pytest.param(*case, marks=pytest.mark.sweep)
        for case in (
            ({"data": 1, "sequence": 8}, ALL, None),
            ({"data": 1, "fsdp": 2, "sequence": 2, "tensor": 2}, ALL, None),
        )
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "model", "segments"), CUTS)
def test_rows_over_devices_give_one_devices_logits_loss_and_gradients(
    cut, model, segments, ids, whole
):
    mesh = make_mesh(MeshConfig(**cut))
    (got, logits), gradients = on_mesh(mesh, build(model), ids, segments)
    (want, one_logits), one_gradients = whole(model, segments)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_values_close(logits, one_logits)
    assert len(logits.sharding.device_set) == 8
    leaves = [jax.tree.leaves(tree) for tree in (gradients, one_gradients)]
    assert_gradients_close(*leaves)


@pytest.mark.slow
def test_only_summaries_and_chunk_ends_cross_devices(ids):
    """What a device receives grows with T / C, or not at all with T."""
    mesh = make_mesh(MeshConfig(data=1, sequence=8))
    for name, mixer in {"rnn": RNN, "rat": rat(chunk=8)}.items():
        received = []
        for length in (64, 128):
            rows = jnp.zeros((BATCH, length), jnp.int32)
            model = build(small(mixer))
            with jax.set_mesh(mesh):
                rows = jax.device_put(rows, batch_sharding(mesh))

                @partial(jax.jit, compiler_options=QUICK_COMPILE)
                def run(model, rows):
                    return model.hidden(Tokens(rows), model.init_cache(BATCH, 0))[0]

                text = run.lower(model, rows).compile().as_text()
            gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
            sizes = [int(np.prod([int(n) for n in s.split(",")])) for s in gathered]
            received.append(sum(sizes))
        channels = BATCH * HEADS * 4
        assert received[0] >= 2 * channels  # gate products and states, keys and values
        if name == "rnn":
            assert received == [2 * 8 * channels] * 2
        else:
            assert received == [2 * length // 8 * channels for length in (64, 128)]


def test_what_cannot_be_cut_says_why():
    cut = partial(obstacle, count=4)
    assert cut(ALL.stack, 32) is None
    assert "32 tokens" not in (cut(ALL.stack, 48) or "")
    by_name = {
        "a row of 30 tokens does not divide into 4 shards": (ALL, 30),
        "a chunk of 4 tokens must not cross shards of 6": (ALL, 24),
        "a window of 3 tokens must not be longer than a shard of 2": (small(WINDOW), 8),
        "the reversed design does not run": (SWITCHES["reversed"], 32),
        "Mamba does not run over sequence shards": (SWITCHES["rat_beside_mamba"], 32),
        "a Recurrent Transformer layer does not run": (SWITCHES["rat_beside_rt"], 32),
    }
    for reason, (model, length) in by_name.items():
        assert reason in cut(model.stack, length)
    alibi = dataclasses.replace(FULL.attention, position=Alibi())
    bent = dataclasses.replace(FULL, attention=alibi)
    assert "ALiBi does not run over sequence shards" in cut(small(bent).stack, 32)
    chosen = dataclasses.replace(FULL.attention, implementation="cudnn")
    bound = dataclasses.replace(FULL, attention=chosen)
    assert "implementation cudnn does not run" in cut(small(bound).stack, 32)


@pytest.mark.parametrize("name", ["rat", "rnn", "reversed", "mamba", "rt"])
def test_a_call_that_cannot_be_cut_is_an_error(name):
    length = 31 if name == "rnn" else 24
    model = build(small(RT) if name == "rt" else SWITCHES[name])
    rows = jnp.zeros((BATCH, length), jnp.int32)
    with (
        jax.set_mesh(make_mesh(MeshConfig(data=1, sequence=8))),
        pytest.raises(ValueError, match=r"(Mixer|Layer)Config: .*(shards|cross)"),
    ):
        jax.eval_shape(
            lambda: model.hidden(Tokens(rows), model.init_cache(BATCH, 0))[0]
        )


def experiment(*, length=32, stack=ALL.stack, **mesh):
    tiny = dataclasses.replace(config(), mesh=MeshConfig(**mesh))
    return changed(tiny, model={"stack": stack}, training={"length": length})


def test_a_run_that_cannot_be_cut_is_refused_before_it_starts(tmp_path):
    cut = {"data": 2, "sequence": 4}
    with pytest.raises(UserError, match="mesh.sequence = 4: a row of 30 tokens"):
        Session(experiment(length=30, **cut), tmp_path)
    with pytest.raises(UserError, match="TransformerConfig is not: leave it at 1"):
        Session(experiment(stack=config().model.stack, **cut), tmp_path)


@pytest.mark.sweep
def test_a_run_over_sequence_shards_trains_as_one_device_does(tmp_path, monkeypatch):
    matches = []
    for name, cut in {"one": {}, "eight": {"fsdp": 2, "sequence": 4}}.items():
        count = int(np.prod(list(cut.values()), dtype=int))
        devices = jax.devices()[:count]
        monkeypatch.setattr(
            session_module, "make_mesh", lambda mesh, d=devices: make_mesh(mesh, d)
        )
        session = Session(experiment(data=1, **cut), tmp_path / name)
        state, losses = session.start(print), []
        try:
            for _ in range(3):
                state, metrics = session.step(state)
                losses.append(float(metrics["loss"]))
            losses.append(session.evaluate(state, between=lambda: None).loss)
        finally:
            session.close()
        matches.append(losses)
    np.testing.assert_allclose(matches[1], matches[0], rtol=1e-5)
