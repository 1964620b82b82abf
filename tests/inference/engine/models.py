"""A model of two layers of every variant, and how requests run on an engine."""

import numpy as np
import pytest

from recurjax.inference.engine import Engine, EngineConfig, Request, RequestSettings
from recurjax.inference.engine.prefix_cache import PrefixCache
from recurjax.inference.sampling import SamplingConfig
from recurjax.layers.mlp import MlpConfig
from tests.variants.latent_recurrent_transformer import switches as latent
from tests.variants.rat import switches as rat
from tests.variants.recurformer import switches as recurformer
from tests.variants.recurrent_transformer import switches as recurrent
from tests.variants.relaxed_recursive_transformer import switches as recursive
from tests.variants.transformer import switches as transformer

VARIANTS = {
    "transformer": (
        transformer,
        transformer.small(
            key_heads=2, windows=(3, None), mlp=MlpConfig(kind="swiglu", width=12)
        ),
    ),
    "recurrent_transformer": (transformer, recurrent.small()),
    "rat": (rat, rat.small(rat.rat(), layers=2)),
    "rnn": (
        rat,
        rat.small(rat.RnnMixerConfig(heads=2, head_width=6, gate_horizon=13), layers=2),
    ),
    "rat_mamba_and_rt": (rat, rat.small(rat.rat(), rat.MAMBA, rat.RT, layers=3)),
    "latent_recurrent_transformer": (latent, latent.SWITCHES["shared"]),
    "relaxed_recursive_transformer": (
        transformer,
        recursive.small(layers=2, windows=(3,), key_heads=2),
    ),
    "recurformer": (recurformer, recurformer.small(((0, 3), ()), key_heads=2)),
}
"""By variant: whose `build` fills the model, and its config."""

FAST = ("rnn",)
"""Variants for which tests that compile a program of their own are not slow."""

LENGTH, SLOTS = 16, 3
SIZES = EngineConfig(
    slots=SLOTS, length=LENGTH, prefill_tokens=8, steps=3, states_gib=1e-3
)
GREEDY = SamplingConfig(temperature=0.0)
DRAWINGS = (
    GREEDY,
    SamplingConfig(),
    SamplingConfig(temperature=0.7, top_k=4),
    SamplingConfig(top_p=0.8, repetition_penalty=1.3),
    SamplingConfig(temperature=2.0, min_p=0.05),
)


def build_model(name: str):
    switches, config = VARIANTS[name]
    return switches.build(config)


def build_engine(model, config: EngineConfig = SIZES, **options) -> Engine:
    """Builds an engine with all its programs, so that requests compile nothing."""
    engine = Engine(model, config, **options)
    engine.compile()
    return engine


def use_prefix_cache(engine: Engine, most_bytes: int = 2**20) -> None:
    """Gives an engine an empty pool; one of no bytes keeps nothing."""
    engine.prefix_cache = PrefixCache(most_bytes)


def finish(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """Runs until nothing is left; returns each request's tokens."""
    for _ in range(1000):
        if not engine.busy:
            break
        engine.step()
    assert all(request.done for request in requests)
    return [request.tokens for request in requests]


def alone(engine: Engine, prompt, settings: RequestSettings) -> list[int]:
    return finish(engine, [engine.submit(prompt, settings)])[0]


def draw_requests(vocabulary: int, count: int, seed: int = 0):
    """Draws prompts of 1 to `LENGTH` tokens with settings that fit the slot."""
    draw = np.random.default_rng(seed)
    results = []
    for number in range(count):
        length = int(draw.integers(1, LENGTH + 1))
        length = {0: 1, 1: LENGTH}.get(number, length)
        most = min(LENGTH - length + 1, int(draw.integers(1, 12)))
        settings = RequestSettings(
            max_new_tokens=most,
            sampling=DRAWINGS[number % len(DRAWINGS)],
            seed=int(draw.integers(2**32)),
            stream=number % 2,
            stop_tokens=(int(draw.integers(vocabulary)),) if number % 3 == 0 else (),
        )
        results.append((draw.integers(vocabulary, size=length), settings))
    return results


INTERLEAVINGS = [
    pytest.param(range(50), id="50"),
    pytest.param(range(50, 200), id="150", marks=pytest.mark.sweep),
]
"""Seeds of `interleave`: what `make test-slow` draws, and a sweep."""


def interleave(engine, requests, expected, seed: int) -> None:
    """Submits and cancels at random between steps; checks what became of each."""
    draw = np.random.default_rng(seed)
    use_prefix_cache(engine, int(draw.integers(2)) * 2**14)
    running, cancelled = [], set()
    left = [int(n) for n in draw.permutation(np.tile(np.arange(len(requests)), 2))]
    while left or engine.busy:
        act = draw.random()
        if left and act < 0.5:
            number = left.pop()
            running.append((number, engine.submit(*requests[number])))
        elif running and act < 0.6:
            _, request = running[int(draw.integers(len(running)))]
            engine.cancel(request)
            cancelled.add(request)
        else:
            engine.step()
        assert engine.active <= engine.slots
    for number, request in running:
        assert request.done
        if request.reason == "cancelled":
            assert request in cancelled
            assert request.tokens == expected[number][: len(request.tokens)]
        else:
            assert request.tokens == expected[number]
    assert engine.active == engine.waiting == 0
