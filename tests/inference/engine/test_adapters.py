"""Several adapters on one base: each row has the tokens of its own merged model."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.exits import ExitRule
from recurjax.inference.engine import Engine, RequestSettings
from recurjax.inference.engine.slots import decode_slots, empty_slots
from recurjax.inference.engine.strategy import choose_strategy
from recurjax.layers import linear
from recurjax.parameters import parameter_name
from recurjax.sharding import MeshConfig, reading_mesh, shardings
from recurjax.surgery.adapters import merged, with_adapters, with_several
from recurjax.training.config import parse_adapters
from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE, compiled_programs
from tests.inference.engine.models import (
    GREEDY,
    LENGTH,
    SIZES,
    SLOTS,
    build_engine,
    build_model,
    finish,
    use_prefix_cache,
)
from tests.marks import slow_except

ADAPTERS = ("lora:2:3", "rslora:3:8:v,out")
"""Of two ranks and scales, on different matrices."""
PROMPT = (3, 1, 4, 1, 5)


def adapted(base, text: str, seed: int):
    """The base with an adapter away from its start, drawn by numpy."""
    draw = np.random.default_rng(seed).normal

    def drawn(path, leaf):
        if not parameter_name(path).endswith(("lora_a", "lora_b")):
            return leaf
        return jnp.asarray(0.8 * draw(size=leaf.shape), leaf.dtype)

    model = with_adapters(base, parse_adapters(text), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(drawn, model)


def settings(adapter: int) -> RequestSettings:
    return RequestSettings(max_new_tokens=8, sampling=GREEDY, adapter=adapter)


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def forward(model, ids):
    return model(Tokens(ids[None]), model.init_cache(1, 0))[0][0]


def greedy(model) -> list[int]:
    """Continues the prompt without a cache; later positions change no earlier one."""
    ids = np.zeros(LENGTH, np.int32)
    ids[: len(PROMPT)] = PROMPT
    for at in range(len(PROMPT), len(PROMPT) + 8):
        ids[at] = np.asarray(forward(model, ids))[at - 1].argmax()
    return ids[len(PROMPT) : len(PROMPT) + 8].tolist()


@pytest.fixture(
    scope="module",
    params=slow_except(
        ("transformer", "recurrent_transformer"),
        [
            *("transformer", "recurrent_transformer", "recurformer", "rat"),
            *("rat_mamba_and_rt", "latent_recurrent_transformer"),
            "relaxed_recursive_transformer",
        ],
        slow=["latent_recurrent_transformer"],
    ),
)
def several(request):
    """An engine of a base with two adapters, and the tokens of the three models."""
    base = build_model(request.param)
    models = [adapted(base, text, seed) for seed, text in enumerate(ADAPTERS)]
    want = [greedy(model) for model in (base, *map(merged, models))]
    return build_engine(with_several(base, models)), want


def test_rows_of_different_adapters_have_the_tokens_of_each_alone(several):
    engine, want = several
    assert len(set(map(tuple, want))) == 3
    with compiled_programs() as compiled:
        for order in ((0, 1, 2), (2, 2, 1), (1, 0, 0, 2, 1)):
            requests = [engine.submit(PROMPT, settings(n)) for n in order]
            assert finish(engine, requests) == [want[n] for n in order]
    assert compiled == []


def test_states_are_kept_for_one_adapter_alone(several):
    engine, want = several
    use_prefix_cache(engine)
    turn = [*PROMPT, *want[1]]
    more = dataclasses.replace(settings(1), max_new_tokens=4)
    finish(engine, [engine.submit(PROMPT, settings(1))])
    for adapter, reused in ((2, 0), (0, 0), (1, len(turn) - 1)):
        request = engine.submit(turn, dataclasses.replace(more, adapter=adapter))
        finish(engine, [request])
        assert request.reused == reused


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["propagate", "verify"])
def test_tokens_that_leave_early_have_their_own_adapters(missing):
    """Tokens, and after how many loops, are those of the merged model's early exits."""
    base = build_model("relaxed_recursive_transformer")
    models = [adapted(base, text, seed) for seed, text in enumerate(ADAPTERS)]
    sizes = dataclasses.replace(
        SIZES, exit=ExitRule(kind="confidence", threshold=0.02), missing=missing
    )
    want = []
    for model in (base, *map(merged, models)):
        engine = build_engine(model, sizes)
        request = engine.submit(PROMPT, settings(0))
        want.append((finish(engine, [request])[0], request.loops))
    assert len({tuple(tokens) for tokens, _ in want}) == 3
    assert len({loops for _, every in want for loops in every}) > 1
    engine = build_engine(with_several(base, models), sizes)
    for order in ((0, 1, 2), (2, 2, 1)):
        requests = [engine.submit(PROMPT, settings(n)) for n in order]
        finish(engine, requests)
        assert [(r.tokens, r.loops) for r in requests] == [want[n] for n in order]


@pytest.mark.slow
def test_rows_over_two_devices_have_their_own_adapters():
    base = build_model("transformer")
    models = [adapted(base, text, seed) for seed, text in enumerate(ADAPTERS)]
    want = [greedy(model) for model in (base, *map(merged, models))]
    several = with_several(base, models)
    mesh = reading_mesh(MeshConfig(data=1, tensor=2))
    spread = jax.device_put(several, shardings(several, mesh))
    engine = build_engine(spread, mesh=mesh)
    # The outputs of the values are cut, and those of their adapters.
    lora_b = spread.stack.blocks[0].attention.w_v[...].lora_b
    assert lora_b.addressable_shards[0].data.size * 2 == lora_b.size
    requests = [engine.submit(PROMPT, settings(n)) for n in (0, 1, 2)]
    assert finish(engine, requests) == want


@pytest.mark.slow
def test_prompts_read_together_have_their_own_adapters():
    base = build_model("transformer")
    models = [adapted(base, text, seed) for seed, text in enumerate(ADAPTERS)]
    sizes = dataclasses.replace(SIZES, states_gib=0.0, prefill_tokens=SLOTS * LENGTH)
    tokens = []
    engine = Engine(with_several(base, models), sizes)
    for order in ((0, 1, 2), (1,), (2,)):
        tokens += finish(engine, [engine.submit(PROMPT, settings(n)) for n in order])
    assert any(key[0] == "together" for key in engine._programs._compiled)
    assert tokens[1:3] == tokens[3:] and len(set(map(tuple, tokens))) == 3


def test_a_model_without_adapters_has_the_same_program(monkeypatch):
    """The one that it has where nothing chooses adapters."""
    model = build_model("transformer")
    strategy = choose_strategy(model, SIZES, None)

    def text() -> str:
        slots = empty_slots(model, strategy=strategy, rows=SLOTS, length=LENGTH)
        off = np.zeros(SLOTS, bool)
        decode = partial(decode_slots, strategy=strategy, steps=3, top=0)
        return jax.jit(decode).lower(model, None, slots, off, off[0]).as_text()

    want = text()
    monkeypatch.setattr(linear, "_product_by_row", lambda x, w, rows: 1 / 0)
    monkeypatch.setattr("recurjax.inference.engine.slots.for_rows", lambda m, _: m)
    assert text() == want


def test_numbers_that_the_model_has_not_are_refused():
    model = build_model("rnn")
    engine = Engine(model, SIZES)
    with pytest.raises(UserError, match="adapter must be a number up to 0, .* got 1"):
        engine.submit(PROMPT, settings(1))
    engine = Engine(with_several(model, [adapted(model, "lora:2", 0)]), SIZES)
    with pytest.raises(UserError, match="adapter must be a number up to 1, .* got 2"):
        engine.submit(PROMPT, settings(2))
