"""The commands that the tables' docstrings give start each paper's runs.

A small corpus is prepared by the documented words, with a tokenizer of the paper's
shape, and the documented run is trained for a step at a tiny width.
"""

import ast
import gzip
import json
import shlex
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from recurjax.data.config import EmbeddedText
from recurjax.data.corpora import read_corpus
from tests.cli.commands import recurjax
from tests.convert.hf_directories import copy_of, rewrite
from tests.golden.cases import OWN

pytestmark = pytest.mark.slow
# A step for eight devices takes long to compile: `make test-slow` has one paper of each
# kind of data and one that starts from a pretrained model.

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
    folders = ("c4/en", "pg19/train", "fineweb_edu", "slimpajama", "wikipedia")
    for folder in (*folders, "t5", "gpt2", "llama2"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "slimpajama" / "0.jsonl").write_text(
        "".join(json.dumps({"text": each}) + "\n" for each in texts)
    )
    (tmp_path / "wikipedia.txt").write_text(text[:3000])
    with gzip.open(tmp_path / "c4" / "en" / "part.json.gz", "wt") as file:
        file.writelines(json.dumps({"text": each}) + "\n" for each in texts)
    for number, each in enumerate(texts):
        (tmp_path / "pg19" / "train" / f"{number:02}.txt").write_text(each)
    table = pyarrow.table({"text": texts})
    for folder in ("fineweb_edu", "wikipedia"):
        pyarrow.parquet.write_table(table, tmp_path / folder / "0.parquet")
    # By name: BOS and EOS of each, and the count of its tokens.
    shapes = {
        "t5": (32100, ["<pad>", "</s>", "<unk>"]),
        "gpt2": (50257, ["<|endoftext|>"]),
        "llama2": (32000, ["<unk>", "<s>", "</s>"]),
    }
    for name, (vocabulary, special) in shapes.items():
        write_tokenizer(tmp_path / name, vocabulary, special)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_tokenizer(folder: Path, vocabulary: int, special: list[str]) -> None:
    """Writes bytes and words that never occur: as many as the paper's, no merges."""
    words = special + sorted(ByteLevel.alphabet())
    words += [f"word{n}" for n in range(vocabulary - len(words))]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_checkpoint(folder: Path, golden: str, *, tokens: int, rows: int) -> None:
    """Writes a tiny Hugging Face checkpoint with the real sizes of its vocabulary.

    Args:
      golden: the case that has the architecture.
      tokens: of the tokenizer.
      rows: of embedding and head.
    """
    copy_of(OWN / "hf" / golden, folder, vocab_size=rows)

    def grown(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tables = ("embed_in.weight", "embed_tokens.weight", "embed_out.weight")
        return {
            name: np.resize(each, (rows, each.shape[1]))
            if name.endswith((*tables, "lm_head.weight"))
            else each
            for name, each in tensors.items()
        }

    rewrite(folder, grown)
    write_tokenizer(folder, tokens, ["<bos>", "<eos>"])


def done(*words: str) -> None:
    """Runs a command, which must succeed."""
    answer = recurjax(*words)
    assert answer[0] == 0, answer


def trained(paper: str, row: str, *options: str) -> dict:
    """Trains a row for a step and returns the run's config."""
    table = ROOT / "experiments" / paper / "runs.py"
    answer = recurjax("train", f"{table}:{row}", *SHORT, *options)
    assert answer[0] == 0 and "finished at step 1" in answer[1], answer
    prefix = {"relaxed_recursive_transformer": "rrt_", "recurformer": "recurformer_"}
    return json.loads(Path(f"runs/{prefix[paper]}{row}/config.json").read_text())


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


def test_the_recurrent_transformer_on_c4(place, quick_compilation):
    tiny = SIZE | stack(**HEADS, key_heads="2", **{"mlp.width": "32"})
    start("recurrent_transformer", tiny={"": tiny | {"--training.length": "16"}})
    saved = json.loads((place / "runs/rt_c4_300m_recurrent_12/config.json").read_text())
    assert saved["model"]["vocabulary"] == 32100
    assert saved["data"]["validation_fraction"] is None


def test_rat_on_fineweb_and_pg19(place, quick_compilation):
    tiny = SIZE | stack(**{f"pattern.0.{name}": size for name, size in HEADS.items()})
    tiny |= stack(**{"mlp.width": "32"}) | {"--training.length": "32"}
    start("rat", tiny={"": tiny, "pg19_8k_rat64": tiny})


@pytest.mark.sweep
def test_the_latent_recurrent_transformer_on_fineweb(place, quick_compilation):
    tiny = SIZE | stack(**HEADS, key_heads="2", mlp_width="32", length="32")
    tiny |= stack(value_gate_channels="8", vocabulary="300")
    tiny |= stack(**{"memory.sources": "2"})
    tiny |= {"--model.vocabulary": "300", "--training.length": "32"}
    paper = "latent_recurrent_transformer"
    start(paper, bpe="nanochat-bpe:300", tiny={"": tiny})


TEXT = ["--training.length", "16"]


@pytest.mark.sweep
def test_relaxed_recursive_transformers_from_gemma(place, quick_compilation):
    paper = "relaxed_recursive_transformer"
    write_checkpoint(place / "google/gemma-2b", "gemma", tokens=256_000, rows=256_000)
    *prepares, train = documented(paper)
    for words in prepares:
        done(*words)
    row = train[1].partition(":")[2]
    model = trained(paper, row, *TEXT)["model"]
    assert (model["vocabulary"], model["stack"]["transformer"]["width"]) == (
        256_000,
        32,
    )


@pytest.mark.sweep
def test_relaxed_recursive_transformers_from_pythia(place, quick_compilation):
    """Its tables have more rows than its tokenizer has tokens."""
    paper = "relaxed_recursive_transformer"
    place = place / "google" / "pythia-2b"
    write_checkpoint(place, "gpt_neox", tokens=50_277, rows=50_304)
    *prepares, _ = documented(paper)
    for words in prepares:
        done(*(word.replace("gemma", "pythia") for word in words))
    full = trained(paper, "pythia_full_15b", *TEXT)["model"]
    assert (full["vocabulary"], full["pad_vocabulary_to"]) == (50_277, 50_304)
    distilled = trained(paper, "pythia_b2_rank64_60b", *TEXT)
    assert distilled["objective"]["teacher"]["model"] == full
    random = trained(paper, "pythia_b2_random_15b", *TEXT)
    assert random["training"]["start_from"] is None
    assert random["model"]["stack"]["transformer"] == full["stack"]


@pytest.mark.sweep
def test_recurformer_from_qwen2(place, quick_compilation):
    """Its tables have more rows than its tokenizer has tokens."""
    model, rows = "qwen2_0_5b", 151_936
    name = "meta-llama/Llama-2-7b-hf"
    write_checkpoint(place / name, "qwen2", tokens=151_646, rows=rows)
    *prepares, train, hash_hop = documented("recurformer")
    assert train[0] == "train" and "hash_hop.jsonl" in hash_hop
    small = ["--length", "32", "--samples", "4", "--dt-rank", "4"]
    for words in prepares:
        words = [word.replace("llama2_7b", model) for word in words]
        words = [word.replace("llama2", "qwen2") for word in words]
        done(*words, *(small if words[1] == "to-recurformer" else []))
    row = train[1].partition(":")[2].replace("llama2_7b", model)
    for each in (row, row.replace("beta_50", "beta_00")):
        made = trained("recurformer", each, *TEXT)["model"]
        assert (made["vocabulary"], made["pad_vocabulary_to"]) == (151_646, rows)
