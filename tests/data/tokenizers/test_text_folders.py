"""What folders say about text is read as transformers reads it.

`text_folders.py` makes the folders and recorded what transformers reads.
"""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from recurjax.data.tokenizers import JsonTokenizer, load_tokenizer, text_ends
from recurjax.data.tokenizers.checkpoint_text import (
    read_text_settings,
    write_tokenizer_config,
)
from tests.data.tokenizers.text_folders import (
    KINDS,
    RECORD,
    SAMPLES,
    WAYS,
    write_folder,
)

RECORDED = json.loads(RECORD.read_text())


def ids_of(tokenizer: JsonTokenizer, text: str) -> list[int]:
    """The tokens of a text with what begins and ends it."""
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    end = [tokenizer.eos] if tokenizer.adds_eos else []
    return [*begin, *tokenizer.encode(text).tolist(), *end]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_read_as_transformers_reads_it_there_and_back(kind, way, tmp_path):
    want = RECORDED[f"{kind}/{way}"]
    folder = tmp_path / "there"
    folder.mkdir()
    write_folder(folder, kind, way)
    tokenizer = load_tokenizer(folder)
    tokenizer.save(tmp_path / "back")
    for read in (tokenizer, load_tokenizer(tmp_path / "back")):
        assert isinstance(read, JsonTokenizer)
        named = read.names["bos_token"]
        assert (read.added_tokens.get(named), read.eos, read.pad) == (
            want["bos"],
            want["eos"],
            want["pad"],
        )
        assert read.vocabulary == want["tokens"]
        assert read.hash == tokenizer.hash
        for sample, ids, text in zip(SAMPLES, want["ids"], want["texts"], strict=True):
            assert ids_of(read, sample) == ids
            assert read.decode(ids) == text
    ends = (2, 3) if way == "several_ends" else (want["eos"],)
    assert text_ends(tokenizer) == ends


def words_of_a_vocabulary() -> Tokenizer:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "old": 4, "ship": 5}
    library = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
    return library


def merges_ignored() -> Tokenizer:
    """Llama 3's way: a word of the vocabulary is a token, whatever the merges say."""
    library = KINDS["byte_level"]()
    definition = json.loads(library.to_str())
    definition["model"]["ignore_merges"] = True
    definition["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    return Tokenizer.from_str(json.dumps(definition))


@pytest.mark.parametrize(
    "library",
    [*KINDS.values(), words_of_a_vocabulary, merges_ignored],
    ids=[*KINDS, "word_level", "ignore_merges"],
)
def test_no_text_becomes_a_special_token(library):
    """Other than in transformers, whose Unigram finds the names in its vocabulary."""
    tokenizer = JsonTokenizer(library().to_str(), bos="<s>", eos="</s>")
    texts = ["</s>", "old</s>ship", "old </s> ship", "<s>", "<pad>\n</s>"]
    special = {1, 2, 3}
    for text in texts:
        assert special.isdisjoint(tokenizer.encode(text).tolist())
        assert special.isdisjoint(tokenizer.encode_after("old", text).tolist())
        [[ids]] = tokenizer.encode_parts([[text]])
        assert ids.tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.encode("old ship").tolist() == library().encode("old ship").ids


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("roles", [1, 4])
def test_whether_bos_is_known_by_its_name_alone_is_written_and_read(
    tmp_path, by_name, roles
):
    names = {f"{role}_token": f"<{role}>" for role in ("bos", "eos", "pad", "unk")}
    names = dict(list(names.items())[:roles])
    write_tokenizer_config(tmp_path, names, bos_by_name=by_name)
    settings = read_text_settings(tmp_path)
    assert settings.names == names and settings.bos_by_name == by_name
