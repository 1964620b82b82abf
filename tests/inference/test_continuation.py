import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from recurjax.data.tokenizers import ByteTokenizer, JsonTokenizer, Symbols
from recurjax.inference.continuation import Continuation

BYTES = ByteTokenizer()


def run(text: str, stops=(), *, prompt="x") -> tuple[list[str], bool]:
    """Feeds a text byte by byte; returns the pieces, as far as it went."""
    continuation = Continuation(BYTES, BYTES.encode(prompt), stops)
    pieces = []
    for token in BYTES.encode(text).tolist():
        pieces.append(continuation.push(token))
        if continuation.stopped:
            break
    pieces.append(continuation.finish())
    return pieces, continuation.stopped


def test_a_character_appears_with_its_last_byte():
    pieces, _ = run("aé🌍")
    assert pieces == ["a", "", "é", "", "", "", "🌍", ""]


def test_an_unfinished_character_ends_as_a_replacement():
    continuation = Continuation(BYTES, BYTES.encode("x"), [])
    assert continuation.push("é".encode()[0]) == ""
    assert continuation.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("hello world", ["wor"], "hello "),
        ("hello", ["hello"], ""),
        ("aab aaab", ["aaab"], "aab "),
        ("abcabd", ["abd"], "abc"),
        ("one\n\ntwo", ["\n\n", "two"], "one"),
        ("naïve café 🌍 x", ["🌍"], "naïve café "),
        # Both end with the same byte: the one that begins first cuts.
        ("xabc", ["bc", "abc"], "x"),
    ],
)
def test_text_ends_before_the_first_stop_string(text, stops, want):
    pieces, stopped = run(text, stops)
    assert stopped
    assert "".join(pieces) == want


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not():
    pieces, stopped = run("a---b--", ["--->"])
    assert not stopped
    assert pieces == ["a", "", "", "", "---b", "", "", "--"]


def test_a_stop_string_in_the_prompt_does_not_count():
    pieces, stopped = run("ab", ["xa", "END"], prompt="END x")
    assert not stopped
    assert "".join(pieces) == "ab"


@pytest.fixture(scope="module")
def words() -> JsonTokenizer:
    """Words with a leading block character, and bytes for the rest (SentencePiece)."""
    names = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "▁the", "▁cat"]
    vocabulary = {name: number for number, name in enumerate(names)}
    built = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
    )
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    definition = json.loads(built.to_str())
    return JsonTokenizer(json.dumps(definition), bos=None, eos=None)


def test_a_word_keeps_the_space_that_parts_it_from_the_prompt(words):
    the, cat = 257, 258
    assert words.decode([cat]) == "cat"
    continuation = Continuation(words, np.array([the], np.int32), [])
    assert continuation.push(cat) + continuation.finish() == " cat"


def test_a_prompt_that_ends_in_byte_tokens_is_not_repeated(words):
    emoji = [1 + byte for byte in "🌍".encode()]
    prompt = np.array([257, *emoji], np.int32)
    assert words.decode(prompt) == "the🌍"
    continuation = Continuation(words, prompt, [])
    pieces = [continuation.push(token) for token in [*emoji, 258]]
    assert "".join(pieces) + continuation.finish() == "🌍 cat"


def continued(tokenizer, prompt, new) -> str:
    continuation = Continuation(tokenizer, np.array(prompt, np.int32), [])
    return "".join(map(continuation.push, new)) + continuation.finish()


@pytest.mark.parametrize("text", ["a€bcd", "🌍🌍 é€", "x\u0301", "éé"])
def test_a_character_that_the_prompt_begins_is_the_prompts(words, text):
    sizes = [len(character.encode()) for character in text]
    # Also before a token that ends the run of bytes.
    for tokenizer, first, last in ((BYTES, 0, ord("!")), (words, 1, 258)):
        ids = [first + byte for byte in text.encode()]
        for cut in range(len(ids) + 1):
            begun = sum(sum(sizes[:n]) < cut for n in range(len(text)))
            assert continued(tokenizer, ids[:cut], ids[cut:]) == text[begun:]
            whole = tokenizer.decode([*ids, last])
            assert continued(tokenizer, ids[:cut], [*ids[cut:], last]) == whole[begun:]


@pytest.mark.parametrize("prompt", ["€", "a€", "🌍", ""])
@pytest.mark.parametrize(
    ("new", "good"),
    [
        (b"\xff", ""),
        (b"\xf0\x9f", ""),
        (b"b\xff", "b"),
        (b"\xe2\x82\xac\x80", "€"),
    ],
)
def test_bytes_that_are_no_text_take_nothing_from_what_follows(
    words, prompt, new, good
):
    data = prompt.encode()
    for cut in range(len(data) + 1):
        ids = [1 + byte for byte in data[:cut] + new]
        # Characters before the first byte that is no text are certain; that byte and
        # all that follow it in the run are U+FFFD.
        whole = cut in (0, len(data)) or data[:cut] == b"a"
        certain = good if whole else ""
        bad = len(new) - len(certain.encode())
        want = certain + "\ufffd" * bad + " the"
        assert continued(words, ids[:cut], [*ids[cut:], 257]) == want
    # A part of a character is one U+FFFD; halves of a surrogate are one each.
    assert continued(BYTES, [0xE2, 0x82], [0xFF, ord("a")]) == "\ufffda"
    assert continued(BYTES, [0xED, 0xAD], [*"€".encode()]) == "€"


def test_special_tokens_do_not_end_a_run_of_bytes(words):
    built = tokenizers.Tokenizer.from_str(words._definition.decode())
    built.add_special_tokens(["<s>"])
    tokenizer = JsonTokenizer(built.to_str(), bos="<s>")
    bos, (first, second, third) = tokenizer.bos, [1 + byte for byte in "€".encode()]
    # Special tokens are left out before bytes are joined.
    whole = [257, first, second, bos, third, 258]
    assert tokenizer.decode(whole) == "the€ cat"
    assert continued(tokenizer, [], whole) == "the€ cat"
    assert continued(tokenizer, whole[:4], whole[4:]) == " cat"
    assert continued(tokenizer, [bos], [first, second, third, bos]) == "€"


def test_symbols_follow_a_prompt_with_their_space():
    assert continued(Symbols(9), [3, 1], [4, 1]) == " 4 1"
    assert continued(Symbols(9), [], [4, 1]) == "4 1"
