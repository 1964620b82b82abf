"""A server with two adapters of its model, which requests name as models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.data.tokenizers import ByteTokenizer
from recurjax.inference.engine import Engine, EngineConfig, RequestSettings
from recurjax.parameters import parameter_name
from recurjax.serving.prompt_scores import PromptScorer
from recurjax.surgery.adapters import with_adapters, with_several
from recurjax.training.config import AdapterConfig
from tests.compiling import QUICK_COMPILE
from tests.inference.engine.models import GREEDY as PLAIN
from tests.inference.engine.models import alone
from tests.serving.running import GREEDY, running

SIZES = EngineConfig(slots=2, length=24, prefill_tokens=16, steps=4, top_logprobs=1)


@pytest.fixture(scope="module")
def adapting(model):
    draw = np.random.default_rng(0).normal

    def drawn(path, leaf):
        if not parameter_name(path).endswith("lora_b"):
            return leaf
        return jnp.asarray(draw(size=leaf.shape), leaf.dtype)

    one = with_adapters(model, AdapterConfig(rank=2), jax.random.key(0))
    two = with_adapters(model, AdapterConfig(rank=1), jax.random.key(1))
    drawings = [jax.tree_util.tree_map_with_path(drawn, x) for x in (one, two)]
    several = with_several(model, drawings)
    engine = Engine(several, SIZES, tokenizer=ByteTokenizer())
    scorer = PromptScorer(several, length=24, top=1, compiler_options=QUICK_COMPILE)
    with running(lambda: engine, scorer=scorer, adapters=("one", "two")) as result:
        result.wait()
        yield result


NAMES = ("abc", "abc:one", "abc:two")


def test_models_are_listed_with_their_base(adapting):
    _, models = adapting.ask("/v1/models")
    rows = [(row["id"], row["parent"]) for row in models["data"]]
    assert rows == [("abc", None), ("abc:one", "abc"), ("abc:two", "abc")]
    # One engine is counted once.
    _, text = adapting.ask("/metrics")
    slots = [row for row in text.splitlines() if row.startswith("recurjax_slots{")]
    assert slots == ['recurjax_slots{model="abc"} 2.0']


def test_a_request_names_its_adapter(adapting):
    body = {"prompt": [97, 98], "return_token_ids": True, "ignore_eos": True, **GREEDY}
    answers, probabilities = [], []
    for name in NAMES:
        options = {"model": name, "echo": True, "logprobs": 1}
        status, answer = adapting.ask("/v1/completions", body | options)
        assert status == 200 and answer["model"] == name
        (choice,) = answer["choices"]
        answers.append(choice["token_ids"][-6:])
        probabilities.append(choice["logprobs"]["token_logprobs"][1])
    assert adapting.idle()
    for number, tokens in enumerate(answers):
        settings = RequestSettings(
            max_new_tokens=6, sampling=PLAIN, adapter=number, ignore_eos=True
        )
        assert alone(adapting.worker.engine, [97, 98], settings) == tokens
    assert len({tuple(tokens) for tokens in answers}) == 3
    assert len(set(probabilities)) == 3


def test_an_unknown_adapter_is_404_as_openai_says_it(adapting):
    body = {"prompt": "a", "model": "abc:three", **GREEDY}
    status, answer = adapting.ask("/v1/completions", body)
    assert status == 404 and answer["error"] == {
        "message": "there is no model 'abc:three': name one of " + ", ".join(NAMES),
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
