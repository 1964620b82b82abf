import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recurjax.cli.data import run
from recurjax.data.config import DataConfig, Prepared, TokenizerFile
from recurjax.data.corpora import embedded_text
from recurjax.data.dataset import open_dataset
from recurjax.data.prepared import read_manifest
from recurjax.errors import UserError

TEXTS = [embedded_text()[:4000], embedded_text()[4000:9000]]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.txt").write_text(TEXTS[0])
    (tmp_path / "b.txt").write_text(TEXTS[1])
    rows = [{"body": text} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "a.parquet")
    return tmp_path


def prepared(files, *args: str):
    out = files / "out"
    assert run(["prepare", "--out", str(out), *args]) == 0
    return read_manifest(out)


def test_every_format_is_known_by_its_name(files):
    for pattern, field in (
        ("*.txt", "text"),
        ("a.jsonl", "body"),
        ("a.parquet", "body"),
    ):
        out = files / f"out-{pattern[-4:]}"
        args = ["--corpus", str(files / pattern), "--field", field]
        assert run(["prepare", "--out", str(out), *args]) == 0
        manifest = read_manifest(out)
        assert (manifest.documents, manifest.text_bytes) == (2, 9000)


def test_the_printed_config_opens_what_was_prepared(files, capsys):
    prepared(files, "--corpus", str(files / "*.txt"), "--tokenizer", "bpe:300")
    printed = capsys.readouterr()
    code, command = printed.out.split("in an experiment:")[1].split(
        "on the command line:"
    )
    assert command.strip().startswith("recurjax train quickstart --corpus ")
    config = eval(
        code.strip(),
        {
            "DataConfig": DataConfig,
            "Prepared": Prepared,
            "TokenizerFile": TokenizerFile,
        },
    )
    dataset = open_dataset(config)
    assert dataset.vocabulary == 300
    joined = dataset.tokenizer.decode(
        dataset.stream.read([(0, dataset.stream.tokens)])[0]
    )
    assert joined == "".join(TEXTS)
    assert "training a BPE of 300 tokens" in printed.err
    assert "tokenizing 100%" in printed.err


def test_the_embedded_text_can_be_prepared(files):
    manifest = prepared(
        files, "--corpus", "embedded", "--tokenizer", "bytes-without-bos"
    )
    assert manifest.tokens == manifest.text_bytes == 1_036_467
    assert manifest.validation_tokens == 103_646


def test_options_reach_the_corpus(files):
    args = ("--corpus", str(files / "a.txt"), "--separator", "\\n\\n")
    manifest = prepared(files, *args, "--shard-tokens", "1024")
    assert manifest.documents > 20 and len(manifest.shards) > 2


@pytest.mark.parametrize(
    "args, message",
    [
        (["--corpus", "embedded", "--tokenizer", "bpe"], "needs a vocabulary size"),
        (
            ["--corpus", "embedded", "--tokenizer", "bpe:x"],
            "needs an integer SIZE, .*got 'x'",
        ),
        (
            ["--corpus", "embedded", "--tokenizer", "nanochat-bpe:99"],
            r"NanochatBpe\.vocabulary: must be >= 265 and <= 2\^24, got 99",
        ),
        (["--corpus", "embedded", "--tokenizer", "/nowhere"], "no tokenizer at"),
        (["--corpus", "/nowhere/*"], "no file matches '/nowhere/"),
        (["--corpus", "a.jsonl", "b.txt"], "mixes jsonl and text"),
        (
            ["--corpus", "a.jsonl", "--separator", "x"],
            "--separator splits text files only",
        ),
        (["--corpus", "a", "b", "--format", "tfds"], "takes exactly one TFDS folder"),
        (["--corpus", "/nowhere", "--format", "tfds"], "is not a TFDS data set"),
    ],
)
def test_bad_arguments_are_said_in_one_sentence(args, message, tmp_path):
    command = (
        args if args == ["prep"] else ["prepare", "--out", str(tmp_path / "o"), *args]
    )
    with pytest.raises(UserError, match=message) as raised:
        run(command)
    assert "\n" not in str(raised.value)


def test_an_existing_directory_is_refused_before_any_work(files, capsys):
    args = ("--corpus", str(files / "a.txt"))
    prepared(files, *args)
    with pytest.raises(UserError, match="exists already"):
        prepared(files, *args, "--tokenizer", "bpe:300")
    assert "training a BPE" not in capsys.readouterr().err


def test_an_unknown_option_is_named(tmp_path):
    words = ["prepare", "--out", str(tmp_path), "--corpus", "embedded"]
    with pytest.raises(UserError, match="no option --tokeniser: did you mean --tok"):
        run([*words, "--tokeniser", "x"])


def test_help_is_printed(capsys):
    assert run(["--help"]) == 0 and run([]) == run(["prepare"]) == 0
    assert "recurjax data prepare" in capsys.readouterr().out


def test_the_result_does_not_depend_on_the_number_of_workers(files, monkeypatch):
    # Small groups, so that several are on the way at once.
    monkeypatch.setattr("recurjax.data.streams._AT_ONCE", 500)
    args = ["--corpus", str(files / "a.txt"), "--separator", "\\n\\n"]
    args += ["--tokenizer", "bpe:300", "--shard-tokens", "1024"]
    for workers in ("1", "2"):
        out = ["--out", str(files / workers), "--workers", workers]
        assert run(["prepare", *out, *args]) == 0
    one, two = (sorted((files / name).rglob("*.*")) for name in "12")
    assert [file.name for file in one] == [file.name for file in two]
    assert [f.read_bytes() for f in one] == [f.read_bytes() for f in two]


def test_rows_are_shown_with_what_separates_documents(files, capsys):
    out = prepared_folder(files)
    capsys.readouterr()
    assert run(["show", out, "--rows", "2", "--first", "1", "--length", "3000"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("=== row 1: tokens 3,000 to 5,999, train ===\n... ")
    assert f"\n||| <BOS>{TEXTS[1][:50]}" in shown
    with pytest.raises(UserError, match="--first 9: the last row of .* is 3"):
        run(["show", out, "--first", "9", "--length", "3000"])
    capsys.readouterr()
    # Three rows are requested, the default, but the data has fewer.
    assert run(["show", out, "--length", "5000"]) == 0
    assert capsys.readouterr().out.count("=== row") == 2


def test_a_tokenizer_without_bos_and_eos_shows_none(files, capsys):
    words = ["--corpus", str(files / "a.txt"), "--tokenizer", "bytes-without-bos"]
    prepared(files, *words)
    capsys.readouterr()
    assert run(["show", str(files / "out"), "--rows", "1", "--length", "50"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"=== row 0: tokens 0 to 49, train ===\n||| {TEXTS[0][:50]}\n"


def test_a_prepared_folder_is_verified(files, capsys):
    out = prepared_folder(files)
    assert run(["verify", out]) == 0
    text = capsys.readouterr().out
    assert "is complete: 9,002 tokens of 2 documents in 1 shards" in text
    [shard] = (files / "out").glob("*.arrayrecord")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(UserError, match="is damaged: prepare the data again"):
        run(["verify", out])


def test_what_cannot_be_shown_or_prepared_is_one_sentence(files):
    for words, message in (
        (["show"], "Missing from recurjax data show: FOLDER the prepared"),
        (["verify", str(files)], "is not a prepared directory"),
        (["verify", str(files), "more"], "Unrecognized options: more"),
        (["show", str(files), "--rows", "0"], "--rows: must be >= 1, got 0"),
        (
            ["prepare", "--out", "x", "--corpus", "embedded", "--workers", "0"],
            "--workers: must be >= 1, got 0",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(words)


def prepared_folder(files) -> str:
    prepared(files, "--corpus", str(files / "a.txt"), str(files / "b.txt"))
    return str(files / "out")


@pytest.mark.parametrize("part", ["3/2", "0/2", "1", "a/b", "-1/2"])
def test_a_part_that_is_none_is_told(files, part):
    words = ["prepare", "--out", str(files / "o"), "--corpus", "embedded"]
    with pytest.raises(UserError, match=r"--part needs i/n with i from 1 to n"):
        run([*words, f"--part={part}"])


def test_parts_are_prepared_and_merged_at_the_command_line(files, capsys):
    words = ["--corpus", str(files / "a.txt"), "--separator", "\\n\\n"]
    outs = [str(files / f"part{n}") for n in (1, 2)]
    for n, out in enumerate(outs, 1):
        assert run(["prepare", "--out", out, *words, "--part", f"{n}/2"]) == 0
    assert "part 2/2: join all with recurjax data merge" in capsys.readouterr().out
    assert run(["merge", *outs, "--out", str(files / "whole")]) == 0
    assert f'Prepared(directory="{files}/whole")' in capsys.readouterr().out
    whole = read_manifest(files / "whole")
    assert whole == prepared(files, *words)
    with pytest.raises(UserError, match="--max-tokens counts from the beginning"):
        prepared(files, *words, "--part", "1/2", "--max-tokens", "9")
