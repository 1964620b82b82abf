"""Bits per byte count the text's own bytes, whatever the tokens decode to."""

import dataclasses

import numpy as np
import pytest

from recurjax.data.config import (
    DataConfig,
    Mixture,
    Part,
    Prepared,
    TextFiles,
    TokenizerFile,
)
from recurjax.data.dataset import MixtureDataset, lossy_note, open_dataset
from recurjax.data.prepared import prepare
from recurjax.data.tokenizers import load_tokenizer
from recurjax.types import IGNORED
from tests.data.tokenizers.text_folders import KINDS, write_folder

TEXTS = {
    "plain": "hi you.\n\nthe old ship",
    "unknown letters": "hi 漢字漢字. Ünïcode 🌍 " * 3,
    "folded letters": "THE OLD SHIP \u0130\u0130 AND THE SEA",
}


def dataset_of(folder, kind, text):
    write_folder(folder, kind, "post_processor")
    (folder / "text.txt").write_text(text)
    return open_dataset(
        DataConfig(
            corpus=TextFiles(patterns=(str(folder / "text.txt"),)),
            tokenizer=TokenizerFile(path=str(folder)),
            validation_fraction=1.0,
        )
    )


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_text_are_counted_not_those_of_its_tokens(kind, name, tmp_path):
    text = TEXTS[name]
    dataset = dataset_of(tmp_path, kind, text)
    counted = dataset.token_bytes[dataset.tokens("validation")].sum(dtype=np.float64)
    assert counted == pytest.approx(len(text.encode()), rel=1e-6)
    # The unknown token's nats count too.
    unknown = dataset.tokenizer.unknown
    if unknown is not None:
        assert dataset.token_bytes[unknown] > 0
    whole = dataset.tokenizer.token_bytes[dataset.tokens("validation")].sum()
    assert (lossy_note(dataset) is None) == (whole == len(text.encode()))


def test_a_pass_over_a_mixture_counts_the_bytes_of_all_its_texts(tmp_path):
    write_folder(tmp_path, "unigram", "post_processor")
    texts = ["plain words of the old ship. " * 4, "漢字 the 漢字 sea " * 7]
    parts = []
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
        files = TextFiles(patterns=(str(tmp_path / f"{number}.txt"),))
        parts.append(Part(name=f"p{number}", corpus=files, weight=1.0))
    mixture = open_dataset(
        DataConfig(
            corpus=Mixture(parts=tuple(parts)),
            tokenizer=TokenizerFile(path=str(tmp_path)),
            validation_fraction=1.0,
        )
    )
    assert isinstance(mixture, MixtureDataset)
    scales = {part.text_scale for part in mixture.parts.values()}
    assert len(scales) == 2 and 1.0 not in scales
    rows = mixture.loader("validation", length=8, batch=2)
    # The first token of each part is no target: BOS, which has no bytes.
    targets = np.concatenate([np.ravel(batch["targets"]) for batch in rows])
    counted = mixture.token_bytes[targets[targets != IGNORED]].sum(dtype=np.float64)
    assert counted == pytest.approx(sum(len(t.encode()) for t in texts), rel=1e-6)


def test_prepared_data_count_the_same(tmp_path):
    text = TEXTS["unknown letters"]
    memory = dataset_of(tmp_path, "unigram", text)
    assert memory.text_scale != 1.0
    out = tmp_path / "out"
    manifest = prepare(
        memory.config.corpus,
        load_tokenizer(tmp_path),
        out,
        validation_fraction=1.0,
    )
    config = DataConfig(
        corpus=Prepared(directory=str(out)),
        tokenizer=TokenizerFile(path=str(out / "tokenizer")),
    )
    assert open_dataset(config).text_scale == memory.text_scale
    # A directory of an earlier version has no count: its tokens' bytes stand.
    older = dataclasses.replace(manifest, counted_bytes=0)
    (out / "manifest.json").write_text(older.to_json())
    assert open_dataset(config).text_scale == 1.0
