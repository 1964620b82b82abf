"""Times a mixture of five parts against one corpus, from text and from shards."""

import random
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from recurjax.bench.timing import BenchRow, in_turns, row
from recurjax.data.config import (
    Bytes,
    DataConfig,
    Mixture,
    Part,
    PartCorpus,
    Prepared,
    TextFiles,
)
from recurjax.data.corpora import embedded_text
from recurjax.data.dataset import open_dataset
from recurjax.data.prepared import prepare
from recurjax.data.tokenizers import ByteTokenizer

SMALL = {"B": 8, "T": 256}
LARGE = {"B": 64, "T": 2048}
WEIGHTS = (0.4, 0.25, 0.2, 0.1, 0.05)
_BATCHES = 300
"""Batches of one timed call: many more than the batches read ahead, which fall into the
other pipeline's time."""


def rows(*, large: bool, dtype: str, repeats: int) -> Iterator[BenchRow]:
    """Times the same text as one corpus and as five, in turns.

    Each part has a fifth of the text, so that parts are small and their epochs short.
    Batches are read ahead by threads, as in a run.
    """
    shape = LARGE if large else SMALL
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        texts = _texts(root)
        shards = {name: _prepared(corpus, root) for name, corpus in texts.items()}
        for packing in ("concat", "best_fit"):
            for kind, corpora in (("text", texts), ("prepared", shards)):
                pairs = {
                    f"data/{kind}_{packing}/{name}": _batches(corpus, packing, shape)
                    for name, corpus in _pair(corpora).items()
                }
                calls = {n: partial(_take, pipeline) for n, pipeline in pairs.items()}
                tokens = _BATCHES * shape["B"] * shape["T"]
                for name, times in in_turns(calls, repeats=repeats).items():
                    yield row(name, shape, "int32", times, tokens=tokens)


def summary(rows: list[BenchRow]) -> str:
    """Reports for each kind the share of one corpus' rate that five parts reach."""
    rates = {row.name: row.tokens_per_s for row in rows}
    lines = []
    for name, rate in rates.items():
        kind, _, which = name.rpartition("/")
        if which == "five_parts":
            share = rate / rates[f"{kind}/one_corpus"]
            lines.append(f"{kind}: five parts at {share:.2f} of one corpus' rate")
    return "\n".join(lines)


def _pair(corpora: Mapping[str, PartCorpus]) -> dict[str, PartCorpus | Mixture]:
    parts = [
        Part(corpus=corpora[f"part{n}"], weight=weight, name=f"part{n}")
        for n, weight in enumerate(WEIGHTS)
    ]
    return {"one_corpus": corpora["all"], "five_parts": Mixture(parts=tuple(parts))}


def _batches(
    corpus: PartCorpus | Mixture, packing: str, shape: Mapping[str, int]
) -> Iterator[object]:
    config = DataConfig(
        corpus=corpus,
        tokenizer=Bytes(),
        packing="best_fit" if packing == "best_fit" else "concat",
    )
    loader = open_dataset(config).loader("train", length=shape["T"], batch=shape["B"])
    return iter(loader)


def _take(pipeline: Iterator[object]) -> None:
    for _ in islice(pipeline, _BATCHES):
        pass


def _texts(root: Path) -> dict[str, PartCorpus]:
    """Writes the embedded text as short documents, in one file and in five parts."""
    text, draw = embedded_text(), random.Random(0)
    documents, at = [], 0
    while at < len(text):
        size = draw.randrange(50, 500)
        documents.append(text[at : at + size].replace("\n", " "))
        at += size
    share = -(-len(documents) // len(WEIGHTS))
    pieces = {"all": documents}
    for n in range(len(WEIGHTS)):
        pieces[f"part{n}"] = documents[n * share : (n + 1) * share]
    corpora: dict[str, PartCorpus] = {}
    for name, piece in pieces.items():
        file = root / f"{name}.txt"
        file.write_text("\n".join(piece), encoding="utf-8")
        corpora[name] = TextFiles(patterns=(str(file),), separator="\n")
    return corpora


def _prepared(corpus: PartCorpus, root: Path) -> Prepared:
    folder = root / f"{len([*root.iterdir()])}.shards"
    prepare(corpus, ByteTokenizer(), folder)
    return Prepared(directory=str(folder))
