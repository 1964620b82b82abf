"""Clients that others wrote: OpenAI's own, and lm-eval's local-completions."""

import pytest

from tests.serving.running import LETTERS

pytestmark = pytest.mark.slow
GREEDY = {"model": "abc", "temperature": 0, "max_tokens": 6}


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai", reason="needs OpenAI's client: openai")
    base = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as result:
        yield result


def test_openais_client_reads_completions_and_streams(client):
    assert [model.id for model in client.models.list()] == ["abc"]
    result = client.completions.create(prompt="a", logprobs=1, echo=True, **GREEDY)
    assert result.choices[0].text == "abcdefg" and result.usage.total_tokens == 8
    assert len(result.choices[0].logprobs.token_logprobs) == 8
    stream = client.completions.create(prompt="k", stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in stream) == "lmnopq"


def test_openais_client_reads_chats_and_streams(client):
    messages = [{"role": "user", "content": "x"}]
    result = client.chat.completions.create(messages=messages, logprobs=True, **GREEDY)
    assert result.choices[0].message.content == "bcdefg"
    assert result.choices[0].finish_reason == "length"
    assert [row.token for row in result.choices[0].logprobs.content] == list("bcdefg")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(
        client.chat.completions.create(messages=messages, **options, **GREEDY)
    )
    said = [choice.delta.content or "" for p in pieces for choice in p.choices]
    assert "".join(said) == "bcdefg" and pieces[-1].usage.completion_tokens == 6


def test_openais_client_raises_its_own_errors(client):
    import openai  # pyright: ignore[reportMissingImports]

    with pytest.raises(openai.BadRequestError, match="top_p must be a number"):
        client.completions.create(prompt="a", top_p=2, **GREEDY)
    with pytest.raises(openai.NotFoundError, match="there is no model 'x'"):
        client.completions.create(prompt="a", model="x")


def test_lm_evals_client_scores_and_generates(server):
    reason = "needs lm-eval[api]: lm-eval, requests, aiohttp, tenacity"
    for package in ("tenacity", "aiohttp", "requests", "lm_eval"):
        pytest.importorskip(package, reason=reason)
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.models.openai_completions import (  # pyright: ignore[reportMissingImports]
        LocalCompletionsAPI,
    )

    base = f"http://127.0.0.1:{server.port}/v1/completions"
    result = LocalCompletionsAPI(base_url=base, model="abc", max_length=40)
    assert result.tokenizer_backend == "remote"

    def ask(kind, *arguments):
        return [
            Instance(request_type=kind, doc={}, arguments=pair, idx=n)
            for n, pair in enumerate(arguments)
        ]

    pairs = [("ab", "cde"), ("ab", "cdx"), ("xy", "zab")]
    scores = result.loglikelihood(ask("loglikelihood", *pairs))
    # What follows is known: the model's own text is greedy, any other is not.
    assert [greedy for _, greedy in scores] == [True, False, True]
    assert scores[0][0] > scores[1][0]
    wish = {"until": ["k"], "max_gen_toks": 20}
    (text,) = result.generate_until(ask("generate_until", ("def", wish)))
    assert text == LETTERS[6:10]
