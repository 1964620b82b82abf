"""The tokenizer inside a GGUF file, as a tokenizer.json."""

from dataclasses import replace
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from recurjax.data.tokenizers import JsonTokenizer, TextSettings
from recurjax.errors import UserError

_CONTROL, _USER_DEFINED = 3, 4
# Qwen2's words: contractions, letters with one sign before, single digits, signs with
# the line breaks after them, line breaks, spaces.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_tokenizer(fields: dict[str, Any], *, where: str) -> JsonTokenizer:
    """Builds a byte-level BPE from a file's fields.

    BOS begins texts only where the file says so (`add_bos_token`).

    Raises:
      UserError: the file has none, or one of another kind.
    """
    kind, words = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or words not in ("smollm", "gpt-2", "qwen2"):
        raise UserError(
            f"{where}: the tokenizer must be gpt2 with smollm, gpt-2 or qwen2 "
            f"pre-tokens, got {kind!r} with {words!r}: name a tokenizer.json "
            "with --tokenizer"
        )
    tokens = _texts(fields, "tokens", where)
    merges = [merge.partition(" ") for merge in _texts(fields, "merges", where)]
    # A merge is two tokens with a space between.
    if not all(space for _, space, _ in merges):
        raise UserError(
            f"{where}: each merge must be two tokens with a space between: "
            "name a tokenizer.json with --tokenizer"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = tokenizers.Tokenizer(
            models.BPE(vocabulary, [(a, b) for a, _, b in merges])
        )
    except Exception as error:  # the library raises the bare class
        raise UserError(f"{where}: merges do not fit the tokens: {error}") from error
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=words != "qwen2"
    )
    if words == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif words == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    # Which tokens have no text, and which are words that the user defined.
    if not isinstance(kinds, list):
        raise UserError(f"{where}: tokenizer.ggml.token_type must be a list")
    for token, number in zip(tokens, kinds, strict=False):
        if number == _CONTROL:
            tokenizer.add_special_tokens(
                [AddedToken(token, special=True, normalized=False)]
            )
        elif number == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    names = {
        "bos_token": _name(fields, "bos", tokens, where),
        "eos_token": _name(fields, "eos", tokens, where),
        "pad_token": _name(fields, "padding", tokens, where),
    }
    # Which token is BOS and whether it begins texts are two facts: a template may write
    # a BOS that nothing else adds.
    return JsonTokenizer(
        tokenizer.to_str(),
        settings=replace(gguf_text_settings(fields), names=names),
        begins_with_bos=bool(fields.get("tokenizer.ggml.add_bos_token", False)),
    )


def gguf_text_settings(fields: dict[str, Any]) -> TextSettings:
    """Reads the chat template of a file, and the tokens that end an answer.

    A file names the end of a text and that of a turn apart; generation_config.json has
    both in one list.
    """
    template = fields.get("tokenizer.chat_template")
    ends = [fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")]
    ends = list(dict.fromkeys(end for end in ends if type(end) is int))
    return TextSettings(
        template=template if isinstance(template, str) else None,
        generation={"eos_token_id": ends} if ends else None,
    )


def _texts(fields: dict[str, Any], name: str, where: str) -> list[str]:
    texts = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{where} has no list of strings tokenizer.ggml.{name}: name a "
            "tokenizer.json with --tokenizer"
        )
    return texts


def _name(
    fields: dict[str, Any], role: str, tokens: list[str], where: str
) -> str | None:
    number = fields.get(f"tokenizer.ggml.{role}_token_id")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise UserError(
            f"{where}: tokenizer.ggml.{role}_token_id must be a token's number, got "
            f"{number!r}"
        )
    return tokens[number]
