"""What an engine must say, computed plainly: one text at a time, nothing kept."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from recurjax.exits import EarlyExit, confidence, cosine, exits_of, head_score
from recurjax.inference.engine import RequestSettings
from recurjax.inference.sampling import row_keys, sample, sampling_rows
from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE

quick = partial(jax.jit, compiler_options=QUICK_COMPILE)


def tokens_of(model, prompt, settings: RequestSettings, length: int) -> list[int]:
    """Draws each token from the model's forward pass over all tokens before it."""
    ids = np.zeros((1, length), np.int32)
    ids[0, : len(prompt)] = prompt
    text = [int(token) for token in prompt]
    for n in range(settings.max_new_tokens):
        ids[0, : len(text)] = text
        text.append(_drawn(_forward(model, ids)[len(text) - 1], text, n, settings))
        if text[-1] in settings.stop_tokens:
            break
    return text[len(prompt) :]


class EarlyText(NamedTuple):
    """Tokens that leave early, the loops each ran, and what was seen on the way."""

    tokens: list[int]
    loops: list[int]
    logits: list[np.ndarray]
    scores: list[list[float]]


def early_text(
    model, prompt, settings: RequestSettings, length: int, exits: EarlyExit
) -> EarlyText:
    """Runs loop after loop of each token, until the rule lets it leave."""
    stack, missing = exits_of(model), exits.missing
    ids = jnp.asarray([prompt], jnp.int32)
    x, cache = _read(model, ids, length=length)
    logits, text = model.logits(x[0, -1]), [int(token) for token in prompt]
    results = EarlyText([], [], [], [])
    # Positions without a token count as run: they are hidden by causality.
    ran, b, scores = np.full((1, length), stack.exits, np.int32), stack.exits, []
    for n in range(settings.max_new_tokens):
        text.append(_drawn(logits, text, n, settings))
        results.tokens.append(text[-1])
        results.loops.append(b)
        results.logits.append(np.asarray(logits))
        results.scores.append(scores)
        # The last token is drawn and not run: nothing follows it.
        last = n + 1 == settings.max_new_tokens
        if last or text[-1] in settings.stop_tokens:
            break
        newest, scores = Tokens(jnp.asarray([text[-1:]], jnp.int32)), []
        x = _enter(model, newest, cache)
        for b in range(1, stack.exits + 1):  # noqa: B007
            x, cache, logits, score = _loop(
                model,
                x,
                cache,
                newest,
                jnp.asarray(ran) if missing == "skip" else None,
                exits.head,
                b=b,
                kind=exits.rule.kind,
            )
            scores.append(float(score))
            if scores[-1] > exits.rule.threshold:
                break
        if missing == "propagate":
            cache = _propagate(model, x, cache, newest, b=b)
        cache = _advance(model, cache, newest)
        ran[0, len(text) - 1] = b
    return results


@quick
def _forward(model, ids):
    return model(Tokens(ids), model.init_cache(1, 0))[0][0]


def _drawn(logits, text: list[int], n: int, settings: RequestSettings) -> int:
    key = row_keys(settings.seed, settings.stream + 1)[settings.stream]
    seen = np.zeros((1, logits.shape[-1]), bool)
    seen[0, text] = True
    keys = jax.random.fold_in(key, n)[None]
    return int(_sample(keys, logits[None], seen, sampling_rows([settings.sampling]))[0])


_sample = quick(sample)


@partial(quick, static_argnames="length")
def _read(model, ids, *, length):
    return model.hidden(Tokens(ids), model.init_cache(1, length))


@quick
def _enter(model, newest, cache):
    return exits_of(model).enter(model.embed(newest.ids), cache)


@quick
def _advance(model, cache, newest):
    return exits_of(model).advance(cache, newest)


@partial(quick, static_argnames=("b", "kind"))
def _loop(model, x, cache, newest, ran, head, *, b, kind):
    before = x
    x, cache = exits_of(model).loop(x, b - 1, cache, newest, ran=ran)
    normed = model.final_norm(x)
    logits = model.logits(normed)[0, 0]
    if kind == "confidence":
        score = confidence(logits)
    elif kind == "cosine":
        score = cosine(before, x)[0, 0]
    else:  # the deepest loop has no head: the token leaves there anyway
        last = b == exits_of(model).exits
        score = jnp.zeros(()) if last else head_score(head, b, normed)[0, 0]
    return x, cache, logits, score


@partial(quick, static_argnames="b")
def _propagate(model, x, cache, newest, *, b):
    return exits_of(model).propagate(x, b, cache, newest)
