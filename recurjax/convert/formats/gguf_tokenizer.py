"""The tokenizer inside a GGUF file, as a tokenizer.json."""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from recurjax.data.json_tokenizer import JsonTokenizer
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

    BOS is put before documents only where the file says so (`add_bos_token`).

    Raises:
      UserError: the file has none, or one of another kind.
    """
    kind, words = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or words not in ("smollm", "gpt-2", "qwen2"):
        raise UserError(
            f"{where} has a tokenizer of kind {kind!r} with words {words!r}; known is "
            "gpt2 with smollm, gpt-2 or qwen2: name a tokenizer.json with --tokenizer"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=words != "qwen2"
    )
    if words == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif words == "qwen2":
        made.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        made.pre_tokenizer = byte_level
    made.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    for token, number in zip(tokens, kinds, strict=False):
        if number == _CONTROL:
            made.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif number == _USER_DEFINED:
            made.add_tokens([AddedToken(token, special=False, normalized=False)])
    stated = {
        "bos_token": _name(fields, "bos", tokens),
        "eos_token": _name(fields, "eos", tokens),
    }
    if not fields.get("tokenizer.ggml.add_bos_token", False):
        stated["bos_token"] = None
    return JsonTokenizer(made.to_str(), stated=stated)


def _name(fields: dict[str, Any], role: str, tokens: list[str]) -> str | None:
    number = fields.get(f"tokenizer.ggml.{role}_token_id")
    return None if number is None else tokens[number]
