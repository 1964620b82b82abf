"""The commands that the tables' docstrings give start each paper's runs.

A small corpus is prepared by the documented words, with a tokenizer of the paper's
shape, and the documented run is trained for a step at a tiny width.
"""

import ast
import gzip
import json
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from recurjax.data.config import EmbeddedText
from recurjax.data.corpora import read_corpus
from tests.cli.commands import recurjax

pytestmark = pytest.mark.slow  # A step for eight devices takes long to compile.

ROOT = Path(__file__).parents[2]
DOCUMENTS = 60
# A row for each of the eight devices that tests have.
SHORT = ["--training.steps", "1", "--training.batch", "8", "--evaluation.batches", "1"]
SHORT += ["--schedule.warmup-steps", "0"]


def documented(paper: str) -> list[list[str]]:
    """Returns the words of each `recurjax` command in the docstring of runs.py."""
    file = ROOT / "experiments" / paper / "runs.py"
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    commands = text.replace("\\\n", " ").splitlines()
    return [
        shlex.split(line)[1:] for line in commands if line.startswith("    recurjax ")
    ]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Lays the corpora and tokenizers out as the commands name them."""
    [document] = read_corpus(EmbeddedText()).documents
    text = document.text[:300_000]
    size = len(text) // DOCUMENTS
    texts = [text[size * i : size * (i + 1)] for i in range(DOCUMENTS)]
    for folder in ("c4/en", "pg19/train", "fineweb_edu", "t5", "gpt2", "llama2"):
        (tmp_path / folder).mkdir(parents=True)
    with gzip.open(tmp_path / "c4" / "en" / "part.json.gz", "wt") as file:
        file.writelines(json.dumps({"text": each}) + "\n" for each in texts)
    for number, each in enumerate(texts):
        (tmp_path / "pg19" / "train" / f"{number:02}.txt").write_text(each)
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "fineweb_edu" / "0.parquet")
    # By name: BOS and EOS of each, and how many tokens there are.
    shapes = {
        "t5": (32100, ["<pad>", "</s>", "<unk>"]),
        "gpt2": (50257, ["<|endoftext|>"]),
        "llama2": (32000, ["<unk>", "<s>", "</s>"]),
    }
    for name, (vocabulary, special) in shapes.items():
        # Bytes, and words that never occur: as many as the paper's, no merges.
        words = special + sorted(ByteLevel.alphabet())
        words += [f"word{n}" for n in range(vocabulary - len(words))]
        ids = {word: number for number, word in enumerate(words)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.add_special_tokens(special)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(paper: str, *, bpe: str | None = None, tiny: dict[str, dict[str, str]]):
    """Runs the documented commands; `tiny` has options for each corpus' run."""
    *prepares, train = documented(paper)
    assert train[0] == "train" and train[1].startswith(f"experiments/{paper}/runs.py:")
    assert [words[:2] for words in prepares] == [["data", "prepare"]] * len(tiny)
    for words in prepares:
        if bpe is not None:
            words[words.index("--tokenizer") + 1] = bpe
        answer = recurjax(*words)
        assert answer[0] == 0, answer
    for row, options in tiny.items():
        table, _, name = train[1].partition(":")
        words = [f"{ROOT / table}:{row or name}", *SHORT]
        words += [word for option in options.items() for word in option]
        answer = recurjax("train", *words)
        assert answer[0] == 0 and "finished at step 1" in answer[1], answer


def stack(**fields: str) -> dict[str, str]:
    """Returns options that replace fields of the stack."""
    return {f"--model.stack.{name}": value for name, value in fields.items()}


SIZE = stack(layers="2", width="16")
HEADS = {"heads": "2", "head_width": "8"}


def test_the_recurrent_transformer_on_c4(place, unoptimized):
    tiny = SIZE | stack(**HEADS, key_heads="2", **{"mlp.width": "32"})
    start("recurrent_transformer", tiny={"": tiny | {"--training.length": "16"}})
    saved = json.loads((place / "runs/rt_c4_300m_recurrent_12/config.json").read_text())
    assert saved["model"]["vocabulary"] == 32100
    assert saved["data"]["validation_fraction"] is None


def test_rat_on_fineweb_and_pg19(place, unoptimized):
    tiny = SIZE | stack(**{f"pattern.0.{name}": size for name, size in HEADS.items()})
    tiny |= stack(**{"mlp.width": "32"}) | {"--training.length": "32"}
    start("rat", tiny={"": tiny, "pg19_8k_rat64": tiny})


def test_the_latent_recurrent_transformer_on_fineweb(place, unoptimized):
    tiny = SIZE | stack(**HEADS, key_heads="2", mlp_width="32", length="32")
    tiny |= stack(value_gate_channels="8", vocabulary="300")
    tiny |= stack(**{"memory.sources": "2"})
    tiny |= {"--model.vocabulary": "300", "--training.length": "32"}
    paper = "latent_recurrent_transformer"
    start(paper, bpe="nanochat-bpe:300", tiny={"": tiny})
