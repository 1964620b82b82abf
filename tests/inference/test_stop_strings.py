"""Random texts, stop strings and tokenizers: no text holds a stop, none ends late."""

import numpy as np
import pytest

from recurjax.data.tokenizers import JsonTokenizer, load_tokenizer
from recurjax.inference.continuation import Continuation
from tests.data.tokenizers.text_folders import KINDS, write_folder

LETTERS = [
    "a",
    "b",
    " ",
    "\n",
    "\n\n",
    "the",
    "old ",
    "é",
    "漢",
    "🌍",
    ".",
    "ab",
    "<s>",
]
TEXTS = 1250
"""Of each kind of tokenizer: 10,000 together."""


def drawn(rng: np.random.Generator, most: int) -> str:
    return "".join(rng.choice(LETTERS, size=int(rng.integers(1, most))))


def stopped_text(tokenizer: JsonTokenizer, prompt, ids, stops) -> tuple[str, bool, int]:
    """The definition: all text so far is searched again after every token."""
    stream, text = tokenizer.stream(), ""
    stream.skip(prompt)
    named = {i for name, i in tokenizer.added_tokens.items() if name in stops}
    for used, token in enumerate(ids, 1):
        if token in named:
            text += stream.finish()
        else:
            text += stream.push([token])
        if starts := [text.find(stop) for stop in stops if stop in text]:
            return text[: min(starts)], True, used
        if token in named:
            return text, True, used
    text += stream.finish()
    starts = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(starts)], True, len(ids)) if starts else (text, False, len(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_holds_a_stop_string_and_none_ends_late(kind, tmp_path):
    write_folder(tmp_path, kind, "names")
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, JsonTokenizer)
    rng, hits = np.random.default_rng(len(kind)), 0
    for _ in range(TEXTS):
        prompt = tokenizer.encode(drawn(rng, 5)).tolist()
        ids = tokenizer.encode_after("a", drawn(rng, 12)).tolist()
        # A special token may come anywhere in what a model writes.
        if rng.random() < 0.2:
            ids.insert(int(rng.integers(len(ids) + 1)), 1)
        stops = [drawn(rng, 3) for _ in range(int(rng.integers(1, 4)))]
        row, text, used = Continuation(tokenizer, np.array(prompt), stops), "", 0
        for token in ids:
            used += 1
            text += row.push(token)
            if row.stopped:
                break
        text += row.finish()
        want = stopped_text(tokenizer, prompt, ids, stops)
        assert (text, row.stopped, used) == want, (prompt, ids, stops)
        assert not any(stop in text for stop in stops)
        hits += row.stopped
    assert TEXTS // 4 < hits < TEXTS


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_for_a_token_does_not_grow_with_the_text_before_it(
    kind, tmp_path, monkeypatch
):
    """Counted in tokens that the library decodes, not in seconds."""
    write_folder(tmp_path, kind, "names")
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, JsonTokenizer)
    [some] = tokenizer.encode_many(["the old ship of the sea " * 8])
    counts = []
    for before in (128, 131_072):
        row = Continuation(tokenizer, np.resize(some, before), ["###"])
        decoded = 0
        if hasattr(row._stream, "_decoded"):
            plain = row._stream._decoded

            def counting(ids, plain=plain):
                nonlocal decoded
                decoded += len(ids)
                return plain(ids)

            monkeypatch.setattr(row._stream, "_decoded", counting)
        for token in some[:64].tolist():
            row.push(token)
        counts.append(decoded)
    assert counts[0] == counts[1] <= 64 * 4
