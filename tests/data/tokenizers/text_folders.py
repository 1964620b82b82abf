"""Small folders that say about text what checkpoints say, each in another way.

Eight kinds of tokenizer times eight ways to state BOS, EOS and further tokens. Run as a
script where transformers is installed, it writes what transformers reads from them, or
from the copies in FOLDERS/<kind>/<way>:

    python -m tests.data.tokenizers.text_folders OUT.json [FOLDERS]

RECORD is such an OUT.json.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

RECORD = Path(__file__).with_name("text_folders.json")
SAMPLES = ["hi you", " two  spaces\n\nand lines ", "né 漢字 🌍", "", "A.b, c!"]
SPECIALS = ["<unk>", "<s>", "</s>", "<pad>"]
ROLES = ["<|user|>", "<|end|>"]
_TEXT = ["the old ship of the old sea, the sea of the old ship. You and me.\n"] * 8
_BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _byte_level(*, space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def _sentencepiece(*, scheme: str | None, before: list[Any] | None = None) -> Tokenizer:
    """BPE with byte fallback; `scheme` None: the space comes from the normalizer."""
    letters = "▁abcdefghijklmnopqrstuvwxyzAYZ.,"
    vocabulary = {
        name: number for number, name in enumerate([*SPECIALS, *_BYTES, *letters])
    }
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "l"), ("ol", "d"), ("o", "u")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    steps = list(before or [])
    strip = []
    if scheme is None:
        steps += [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        strip = [decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme=scheme, split=False
        )
        strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIALS]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    letters = "▁abcdefghijklmnopqrstuvwxyzAY.,!\n"
    pieces = [(name, 0.0) for name in SPECIALS]
    pieces += [("▁the", -2.0), ("▁old", -2.5), ("ship", -3.0)]
    pieces += [(letter, -5.0 - n / 10) for n, letter in enumerate(letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIALS]
    )
    return tokenizer


KINDS = {
    "byte_level": lambda: _byte_level(space=False),
    "byte_level_space": lambda: _byte_level(space=True),
    "prepend": lambda: _sentencepiece(scheme=None),
    "metaspace_first": lambda: _sentencepiece(scheme="first"),
    "metaspace_always": lambda: _sentencepiece(scheme="always"),
    "metaspace_never": lambda: _sentencepiece(scheme="never"),
    "unigram": _unigram,
    "lowercase": lambda: _sentencepiece(
        scheme=None, before=[normalizers.NFC(), normalizers.Lowercase()]
    ),
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


def _begin(tokenizer: Tokenizer, *, ends: bool = False) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A" + (" </s>" if ends else ""),
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )


def _row(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, **plain, "special": True, **flags}


WAYS = {
    # How a folder states its tokens: files by name, and what the post-processor adds.
    "names": ({"tokenizer_config.json": NAMES}, None),
    "post_processor": ({"tokenizer_config.json": NAMES}, {}),
    "post_processor_with_eos": ({"tokenizer_config.json": NAMES}, {"ends": True}),
    "add_bos_token": (
        {"tokenizer_config.json": NAMES | {"add_bos_token": True}},
        None,
    ),
    "no_bos_token": (
        {"tokenizer_config.json": NAMES | {"add_bos_token": False, "bos_token": None}},
        None,
    ),
    "special_tokens_map": (
        {
            "tokenizer_config.json": {"bos_token": "<pad>"},
            "special_tokens_map.json": {
                "bos_token": "<s>",
                "eos_token": {"content": "</s>", "lstrip": False},
                "pad_token": "<pad>",
            },
        },
        {},
    ),
    "added_tokens_decoder": (
        {
            "tokenizer_config.json": NAMES
            | {
                "eos_token": "<|end|>",
                "added_tokens_decoder": {
                    "{next}": _row("<|user|>", special=False),
                    "{after}": _row("<|end|>", rstrip=True),
                },
            },
            # Not read where the config has added_tokens_decoder.
            "special_tokens_map.json": {"eos_token": "<pad>"},
        },
        {},
    ),
    "several_ends": (
        {
            "tokenizer_config.json": NAMES,
            "generation_config.json": {"eos_token_id": [2, 3]},
            "config.json": {"model_type": "llama", "eos_token_id": 2},
        },
        None,
    ),
}


def write_folder(folder: Path, kind: str, way: str) -> None:
    """Writes one of the folders."""
    tokenizer = KINDS[kind]()
    files, begin = WAYS[way]
    if begin is not None:
        _begin(tokenizer, **begin)
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    for name, values in files.items():
        if name == "tokenizer_config.json":
            values = _CLASS | values
        text = json.dumps(values).replace("{next}", str(size))
        (folder / name).write_text(text.replace("{after}", str(size + 1)))


def read_by_transformers(folder: Path) -> dict[str, Any]:
    """Returns what transformers reads from a folder; needs no torch."""
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    read = AutoTokenizer.from_pretrained(folder)
    ids = [read(sample)["input_ids"] for sample in SAMPLES]
    return {
        "bos": read.bos_token_id,
        "eos": read.eos_token_id,
        "pad": read.pad_token_id,
        "tokens": len(read),
        "ids": ids,
        "texts": [
            read.decode(
                row, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            for row in ids
        ],
    }


def main(out: Path, folders: Path | None = None) -> None:
    """Writes what transformers reads from every folder."""
    import transformers  # pyright: ignore[reportMissingImports]

    record: dict[str, Any] = {"transformers": transformers.__version__}
    for kind in KINDS:
        for way in WAYS:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                if folders is None:
                    write_folder(folder, kind, way)
                else:
                    folder = folders / kind / way
                record[f"{kind}/{way}"] = read_by_transformers(folder)
    out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
