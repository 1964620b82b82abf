"""An engine on two devices, and one that reads prompts in sweeps."""

import dataclasses

import jax
import pytest

from recurjax.errors import UserError
from recurjax.exits import ExitRule
from recurjax.inference.engine import EngineConfig, RequestSettings
from recurjax.inference.generate import generate_tokens
from recurjax.sharding import MeshConfig, reading_mesh, shardings
from tests.compiling import compiled_programs
from tests.inference.engine.models import (
    GREEDY,
    SIZES,
    build_engine,
    build_model,
    draw_requests,
    finish,
)


@pytest.mark.slow
def test_an_engine_over_two_devices_makes_the_tokens_of_one():
    model = build_model("transformer")
    requests = draw_requests(model.config.vocabulary, 7)
    one = build_engine(model)
    expected = finish(one, [one.submit(*request) for request in requests])
    mesh = reading_mesh(MeshConfig(data=1, tensor=2))
    spread = jax.device_put(model, shardings(model, mesh))
    two = build_engine(spread, mesh=mesh)
    two.compile()
    # Heads are cut: neither device holds all keys.
    keys = jax.tree.leaves(two._state.cache)
    assert any(leaf.addressable_shards[0].data.size < leaf.size for leaf in keys)
    with compiled_programs() as compiled:
        result = finish(two, [two.submit(*request) for request in requests])
    assert result == expected and compiled == []


def test_tokens_leave_early_on_one_device():
    mesh = reading_mesh(MeshConfig(data=1, tensor=2))
    rule = ExitRule(kind="confidence", threshold=0.5)
    config = EngineConfig(slots=1, length=8, exit=rule)
    with pytest.raises(UserError, match="leave the mesh out"):
        build_engine(build_model("relaxed_recursive_transformer"), config, mesh=mesh)


@pytest.mark.slow
def test_prompts_read_in_sweeps_go_on_as_in_generate():
    model = build_model("latent_recurrent_transformer")
    sizes = dataclasses.replace(
        SIZES, prefill="sweeps:4", states_gib=0.0, prefill_tokens=16
    )
    engine = build_engine(model, sizes)
    prompts = [ids for ids, _ in draw_requests(model.config.vocabulary, 5)]
    prompts = [ids for ids in prompts if len(ids) < 14]
    settings = RequestSettings(max_new_tokens=3, sampling=GREEDY)
    result = finish(engine, [engine.submit(ids, settings) for ids in prompts])
    whole = generate_tokens(
        model,
        prompts,
        max_new_tokens=3,
        sampling=GREEDY,
        prefill="sweeps:4",
        cache_length=16,
        chunk=4,
    )
    assert result == [ids.tolist() for ids in whole.tokens]
