import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from recurjax.data.config import TextFiles
from recurjax.data.prepared import prepare
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.training.loop import train
from recurjax.training.run import RunDirectory, load_run
from tests.cli.commands import TINY, assert_refused, experiment_file, recurjax
from tests.training.tiny_experiment import changed, config

OPTIONS = [
    (
        "--training.stepz 3",
        r"no option --training.stepz: did you mean --training.steps\?",
    ),
    ("--steps 3", r"there is no option --steps: did you mean --training.steps\?"),
    ("--optimiser.b1=0.5", r"no option --optimiser.b1: did you mean --optimizer.b1\?"),
    (
        "--training.steps many",
        r"--training.steps: .*'many' \(it needs an integer\)",
    ),
    ("--optimizer.learning-rate", "Missing value .*--optimizer.learning-rate"),
    ("--data.packing tight", r"'tight'.*--data.packing.*'concat', 'best_fit'"),
    ("--training.profile 3", r"--training.profile: .*\{INT INT\}"),
    ("--training.deterministic True", "Unrecognized options: True"),
    ("stray", "Unrecognized options: stray"),
    ("--training.steps 0", "^recurjax: --training.steps: must be >= 1, got 0"),
    ("--training.accumulation 3", "batch must be a multiple of .*accumulation"),
    ("--training.profile 5 2", r"first <= last, got \(5, 2\)"),
    (
        "--schedule.warmup-steps 13",
        "warmup_steps must be between 0 and .* = 12, got 13",
    ),
    ("--name a/b", "name must be usable as the name of a dir"),
    ("--runs", "--runs needs a directory"),
    (
        "--model.vocabulary 300",
        "tokenizer has 257 tokens and the model 300: set --model",
    ),
    ("--data.tokenizer.no-bos", "the tokenizer has 256 tokens and the model 257"),
    ("--mesh.data 3", r"the mesh \(data=3, .* does not fit 8 devices: set --mesh.data"),
    (
        "--training.batch 12",
        "a batch of 12 rows does not .* make training.batch / training",
    ),
    (
        "--evaluation.batch 3",
        "a batch of 3 rows .* make evaluation.batch a multiple of 8",
    ),
    (
        "--training.length 2000000",
        "the train split has .* a row of length 2000000 needs",
    ),
    ("--data.validation-fraction 0", "the validation split has 0 tokens"),
]


@pytest.mark.parametrize("options, pattern", OPTIONS, ids=[row[0] for row in OPTIONS])
def test_a_wrong_option_gets_one_sentence(tmp_path, monkeypatch, options, pattern):
    monkeypatch.chdir(tmp_path)
    assert_refused(recurjax("train", TINY, *options.split()), pattern)
    assert not list(tmp_path.iterdir()), "a run directory was made"


def test_the_file_comes_first_and_must_be_there(tmp_path):
    assert_refused(
        recurjax("train", "--training.steps", 3), "name the experiment before"
    )
    assert_refused(
        recurjax("train", tmp_path / "no.py"), "no experiment file at .*no.py"
    )
    assert_refused(recurjax("train", tmp_path), "no experiment file at")


CORPORA = [
    ("TextFiles(patterns=('{folder}/*.txt',))", "no|match"),
    ("TextFiles(patterns=('{folder}/empty.md',))", "empty|no text"),
    ("Prepared(directory='{folder}/nothing')", "nothing"),
    ("Parquet(patterns=('{folder}/empty.md',))", "empty.md"),
]


@pytest.mark.parametrize("corpus, pattern", CORPORA, ids=[row[0] for row in CORPORA])
def test_a_corpus_that_is_missing_or_empty_is_named(tmp_path, corpus, pattern):
    (tmp_path / "empty.md").touch()
    corpus = corpus.format(folder=tmp_path)
    body = f"return changed(tiny(), data={{'corpus': {corpus}}})"
    file = experiment_file(tmp_path, body)
    assert_refused(recurjax("train", file, "--runs", tmp_path / "runs"), pattern)
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_that_did_not_make_the_data_is_told(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("To be, or not to be, that is the question. " * 20)
    code, _, _ = recurjax(
        "data", "prepare", "--out", tmp_path / "data", "--corpus", file
    )
    assert code == 0
    corpus = f"Prepared(directory='{tmp_path}/data')"
    body = (
        f"return changed(tiny(), data={{'corpus': {corpus}, "
        "'tokenizer': Bytes(bos=False)})"
    )
    answer = recurjax("train", experiment_file(tmp_path, body), "--runs", tmp_path)
    assert_refused(answer, "data was prepared with another tokenizer .*: use Tokenizer")
    assert not (tmp_path / "tiny").exists()


@pytest.fixture
def claimed(tmp_path):
    run = RunDirectory(tmp_path / "runs" / "tiny")
    run.claim(config(), ByteTokenizer())
    (run.checkpoints / "3").mkdir(parents=True)  # else it could be started again
    return run


def resume(run, *options):
    return recurjax("train", TINY, "--runs", run.root.parent, *options)


def test_a_run_of_another_config_is_told_field_by_field(claimed):
    answer = resume(claimed, "--training.steps", 13, "--optimizer.b1", 0.8)
    assert_refused(
        answer,
        "holds a run of another config .*training.steps: 13 instead of 12; "
        "optimizer.b1: 0.8 instead of 0.9.*choose another --name",
    )


def test_a_run_below_the_home_is_one_run(claimed, tmp_path, monkeypatch):
    """Bash leaves --runs=~/runs to the program: all files of a run lie together."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    answer = recurjax("train", TINY, "--runs=~/runs", "--optimizer.b1", 0.8)
    assert_refused(answer, f"{claimed.root} holds a run of another config")
    with pytest.raises(UserError, match=f"{claimed.root} holds a run of another"):
        train(changed(config(), optimizer={"b1": 0.8}), Path("~/runs/tiny"))
    with pytest.raises(UserError, match=f"{claimed.root} has no checkpoint yet"):
        load_run("~/runs/tiny")
    # Neither a run nor a lock in a folder named "~".
    assert not any((tmp_path / "here").iterdir())


def test_a_run_that_saved_nothing_starts_anew_with_other_settings(claimed, tmp_path):
    (claimed.checkpoints / "3").rmdir()
    # Accepted, and refused only for what comes later.
    answer = resume(claimed, "--optimizer.b1", 0.8, "--training.length", 2000000)
    assert_refused(answer, "a row of length 2000000 needs")


def test_a_tokenizer_changed_in_the_run_directory_is_told(claimed):
    ByteTokenizer(bos=False).save(claimed.tokenizer)
    assert_refused(
        resume(claimed), "has 256 tokens and the model 257: restore the run's own"
    )
    shutil.rmtree(claimed.tokenizer)
    assert_refused(resume(claimed), "no tokenizer at .*runs/tiny/tokenizer")


def test_a_damaged_config_is_told(claimed):
    text = claimed.config.read_text()
    claimed.config.write_text(text[: len(text) // 2])
    assert_refused(resume(claimed), "tiny/config.json is not valid JSON")
    claimed.config.write_text(text.replace('"steps"', '"stepz"'))
    assert_refused(resume(claimed), "config.json.training has no field stepz")


def test_a_place_that_cannot_hold_a_run_is_told(tmp_path):
    (tmp_path / "file").touch()
    assert_refused(recurjax("train", TINY, "--runs", tmp_path / "file"), "file/tiny")


def test_a_full_disk_is_told(claimed, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    claimed.config.unlink()
    assert_refused(resume(claimed), "No space left on device")


def test_an_unknown_command_names_the_nearest():
    assert_refused(recurjax("trian", TINY), r"no command 'trian': did you mean train\?")
    assert_refused(recurjax("fly"), "no command 'fly': known: train, ")


def test_help_is_no_error():
    for words in ([], ["--help"], ["train"], ["train", "--help"]):
        code, out, err = recurjax(*words)
        assert (code, err) == (0, "") and out.startswith("usage: recurjax")
    for words in ("generate", "chat", "serve", "evaluate", "bench", "convert", "data"):
        code, out, err = recurjax(words)
        assert (code, err) == (0, "") and out.startswith(f"usage: recurjax {words} ")
        assert f"\n  recurjax {words} " in out, "an example"
    code, out, err = recurjax("train", TINY, "--help")
    assert (code, err) == (0, "") and "--model.stack.attention.heads INT" in out


def test_options_replace_what_the_file_says():
    from recurjax.cli.options import override

    words = "--mesh.data 4 --training.gradient-clip None --training.steps=7"
    words += (
        " --training.deterministic --data.tokenizer.no-bos --schedule.warmup_steps 1"
    )
    got = override(config(), words.split(), prog="train")
    assert (got.mesh.data, got.training.gradient_clip) == (4, None)
    assert (got.training.steps, got.training.deterministic) == (7, True)
    assert (got.data.tokenizer.bos, got.schedule.warmup_steps) == (False, 1)
    same = dataclasses.replace(
        got,
        mesh=config().mesh,
        training=config().training,
        data=config().data,
        schedule=config().schedule,
    )
    assert same == config()


def test_swapped_shards_of_one_size_are_found_when_a_run_begins(tmp_path):
    text = "".join(chr(97 + i * i % 26) for i in range(3 * 65536))
    (tmp_path / "text.txt").write_text(text)
    data = tmp_path / "data"
    prepare(
        TextFiles(patterns=(str(tmp_path / "text.txt"),)),
        ByteTokenizer(),
        data,
        shard_tokens=65536,
        validation_fraction=0.1,
    )
    one, two = sorted(data.glob("tokens-*"))[:2]
    assert one.stat().st_size == two.stat().st_size
    moved = one.rename(data / "aside")
    two.rename(one)
    moved.rename(two)
    shards = f"Prepared(directory={str(data)!r})"
    part = "Part(name={!r}, weight=1.0, corpus={})".format
    mixture = f"Mixture(parts=({part('a', 'EmbeddedText()')}, {part('b', shards)}))"
    for corpus in (shards, mixture):
        body = f"return changed(tiny(), data={{'corpus': {corpus}}})"
        file = experiment_file(tmp_path, body)
        answer = recurjax("train", file, "--runs", tmp_path / "runs")
        assert_refused(answer, "shard .*tokens-00000.* is damaged")
        assert not (tmp_path / "runs").exists()
