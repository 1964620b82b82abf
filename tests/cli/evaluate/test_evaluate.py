import dataclasses
import json
import math
import shutil

import pytest

from recurjax.cli.evaluate.command import run
from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.corpora import embedded_text
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.training.objective import Interleaved
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from tests.cli.commands import assert_refused, recurjax, without_progress
from tests.variants.latent_recurrent_transformer.switches import byte_model

TEXT = "To be, or not to be, that is the question:\n" * 3


def evaluate(*words):
    code, out, err = recurjax("evaluate", *words)
    assert (code, without_progress(err)) == (0, ""), (out, err)
    return json.loads(out)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.mark.slow
def test_a_file_gets_loss_perplexity_and_bits_per_byte(finished, text, tmp_path):
    out = tmp_path / "out.json"
    got = evaluate(finished, "--text", text, "--batch", 2, "--json", out)
    assert json.loads(out.read_text()) == got
    assert list(got)[:4] == ["run", "step", "text", "length"]
    assert [*got.values()][:4] == [str(finished), 12, str(text), 16]
    # BOS precedes the text and is not predicted.
    assert got["tokens"] == got["bytes"] == len(TEXT)
    assert 2 < got["loss"] < math.log(300)
    assert got["perplexity"] == pytest.approx(math.exp(got["loss"]))
    # Every token is one byte.
    assert got["bits_per_byte"] == pytest.approx(got["loss"] / math.log(2))
    assert not list(tmp_path.glob(".*.partial"))


def test_the_batch_changes_nothing_and_the_length_what_a_row_sees(finished, text):
    small, large = (evaluate(finished, "--text", text, "--batch", b) for b in (1, 64))
    assert small["loss"] == pytest.approx(large["loss"], rel=1e-5)
    longer = evaluate(finished, "--text", text, "--length", 129, "--batch", 1)
    assert (longer["length"], longer["tokens"]) == (129, len(TEXT))
    assert longer["loss"] != pytest.approx(small["loss"], rel=1e-4)


def test_the_loss_by_position_reads_further_than_training_did(finished, text, tmp_path):
    png = tmp_path / "loss.png"
    words = ("--text", text, "--length", 64, "--positions", 24, "--plot", png)
    got = evaluate(finished, *words)
    stretches = got["positions"]
    spans = [(part["start"], part["stop"]) for part in stretches]
    assert spans == [(0, 24), (24, 48), (48, 64)]
    assert sum(part["tokens"] for part in stretches) == got["tokens"]
    nats = sum(part["loss"] * part["tokens"] for part in stretches)
    assert nats / got["tokens"] == pytest.approx(got["loss"], rel=1e-5)
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    assert not list(tmp_path.glob(".*.partial"))


def test_without_a_file_it_is_the_validation_split_of_the_run(finished):
    got = evaluate(finished, "--batch", 512)
    assert got["text"] == "validation split"
    whole = len(embedded_text().encode())
    assert got["bytes"] == pytest.approx(whole / 10, abs=2)


@pytest.mark.slow
def test_a_latent_memory_of_documents_has_no_exact_figure(tmp_path):
    """The objective tells a row's documents apart, and the exact recurrence cannot."""
    latent = tmp_path / "latent"
    model = byte_model(MemoryConfig(sources=(1,)))
    experiment = new_experiment(latent, model.config, length=16)
    data = dataclasses.replace(experiment.data, document_segments=True)
    experiment = dataclasses.replace(experiment, data=data, objective=Interleaved())
    write_run(latent, model, experiment, ByteTokenizer())
    words = ("evaluate", latent, "--tokens", 64, "--batch", 4)
    code, out, err = recurjax(*words)
    assert code == 0 and "documents apart: its figure is left out" in err
    assert json.loads(out)["loss"] > 0 and "exact" not in json.loads(out)
    assert_refused(recurjax(*words, "--positions", 4), "cannot tell .* give --text")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    got = evaluate(latent, "--text", text, "--positions", 4)
    assert got["exact"]["tokens"] == len(TEXT) and got["positions"]


def test_a_large_split_is_read_as_far_as_asked(finished):
    """Rows of 16 tokens, four at a time."""
    for words, tokens in (
        (("--tokens", 192), 192),
        (("--tokens", 193), 256),
    ):
        got = evaluate(finished, "--batch", 4, *words, "--positions", 16)
        assert got["tokens"] == tokens
        assert [part["tokens"] for part in got["positions"]] == [tokens]


def test_the_train_split_can_be_asked_for(finished, tmp_path):
    """`evaluate` on the run's own data reads its files, wherever they are on this
    machine.

    Of a run on a shorter text: all of the split is read, nine tenths of it.
    """
    run, file = shutil.copytree(finished, tmp_path / "tiny"), tmp_path / "short.txt"
    file.write_text(embedded_text()[:20_000])
    config = json.loads((run / "config.json").read_text())
    config["data"]["corpus"] = {"type": "TextFiles", "patterns": [str(file)]}
    (run / "config.json").write_text(json.dumps(config))
    got = evaluate(run, "--split", "train", "--batch", 64, "--length", 128)
    assert got["text"] == "train split"
    assert got["bytes"] == pytest.approx(0.9 * 20_000, abs=2)


def test_the_corpus_of_a_config_is_read_for_itself_alone(finished, tmp_path):
    """`generate` and `convert` read nothing of the corpus that a run's `config.json`
    names.
    """
    run = shutil.copytree(finished, tmp_path / "tiny")
    config = json.loads((run / "config.json").read_text())
    config["data"]["corpus"] = {"type": "TextFiles", "patterns": ["/no/where.txt"]}
    (run / "config.json").write_text(json.dumps(config))
    words = ("--prompt", "a", "--max-new-tokens", 1)
    assert recurjax("generate", run, *words)[0] == 0
    words = ("to-torch", run, tmp_path / "out", "--no-check")
    assert recurjax("convert", *words)[0] == 0
    assert_refused(recurjax("evaluate", run), "/no/where.txt")


def test_a_place_that_cannot_take_the_json_is_told_first(finished, tmp_path):
    answer = recurjax("evaluate", finished, "--json", tmp_path / "no" / "out.json")
    assert_refused(answer, "--json: there is no directory .*no$")


def test_an_older_step_can_be_asked_for(finished, text):
    old, new = (evaluate(finished, "--text", text, "--step", s) for s in (9, 12))
    assert (old["step"], new["step"]) == (9, 12) and old["loss"] != new["loss"]
    assert_refused(
        recurjax("evaluate", finished, "--step", 5), "has no checkpoint 5; it has .*12"
    )


def test_mistakes_are_told_in_a_sentence(finished, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    for words, pattern in [
        ((tmp_path / "none",), "no run directory at .*none"),
        ((tmp_path,), "is not a run directory: it has no config.json"),
        ((finished, "--text", tmp_path / "no.txt"), "no.txt"),
        ((finished, "--text", empty), "no text|empty"),
        ((finished, "--text", binary), "binary.txt.*UTF-8"),
        ((finished, "--batch", 0), "--batch: must be >= 1, got 0"),
        ((finished, "--length", "long"), r"--length: .*'long'"),
        ((finished, "--positions", 0), "--positions: must be >= 1, got 0"),
        ((finished, "--tokens", 0), "--tokens: must be >= 1, got 0"),
        ((finished, "--plot", tmp_path / "no" / "a.png"), "--plot: there is no dir"),
        ((finished, "--txt", "a"), r"no option --txt: did you mean --text\?"),
    ]:
        assert_refused(recurjax("evaluate", *words), pattern)


def test_a_run_without_a_checkpoint_or_with_another_tokenizer_is_told(
    finished, tmp_path
):
    run = shutil.copytree(finished, tmp_path / "tiny")
    ByteTokenizer(bos=False).save(run / "tokenizer")
    for command in ("evaluate", "generate"):
        words = ("--prompt", "a") if command == "generate" else ()
        answer = recurjax(command, run, *words)
        assert_refused(
            answer, "has 256 tokens and the model 257: restore the run's own"
        )
    ByteTokenizer().save(run / "tokenizer")
    shutil.rmtree(run / "checkpoints")
    assert_refused(recurjax("evaluate", run), "has no checkpoint yet: train it first")


@pytest.fixture
def requests(tmp_path):
    """Two questions with two choices each."""
    folder = tmp_path / "pick" / "rc_0shot"
    folder.mkdir(parents=True)
    rows = [
        {
            "request": {"context": f"{n} and", "continuation": f" {word}"},
            "idx": choice,
            "doc_id": n,
            "label": n,
        }
        for n in range(2)
        for choice, word in enumerate(["yes", "nothing"])
    ]
    file = folder / "requests.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_request_files_are_scored_kept_and_shown_as_a_table(
    finished, requests, tmp_path
):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "evaluations.jsonl").unlink(missing_ok=True)
    assert_refused(recurjax("evaluate", "table", run), "has no evaluations.jsonl")
    got = evaluate("requests", run, requests, "--batch", 2)
    task = got["tasks"]["pick/rc_0shot"]
    assert task["n"] == 2 and 0 <= task["accuracy"] <= 1
    assert task["nats"] > task["nats_per_token"] > 0
    assert not (run / "evaluations").exists()
    # Over devices, in another batch: the same figures.
    mesh = ("--mesh.data", 2, "--mesh.tensor", 2, "--batch", 4)
    spread = evaluate("requests", run, requests, *mesh)["tasks"]["pick/rc_0shot"]
    assert spread == pytest.approx(task, rel=1e-4)
    code, out, _ = recurjax("evaluate", "table", run)
    assert code == 0 and out.count("| pick/rc_0shot | accuracy |") == 1
    assert out.splitlines()[0].startswith("| task | metric | value |")


@pytest.mark.slow
def test_a_text_is_read_alike_on_several_devices(finished, text):
    words = ("--text", text, "--positions", 8, "--batch", 4)
    one = evaluate(finished, *words)
    for mesh in ("--mesh.data=2", "--mesh.fsdp=2"), ("--mesh.tensor=2",):
        several = evaluate(finished, *words, *mesh)
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-5)
        for got, want in zip(several["positions"], one["positions"], strict=True):
            assert got == pytest.approx(want, rel=1e-5)
    assert_refused(
        recurjax("evaluate", finished, *words, "--mesh.data", 3),
        "a batch of 4 rows does not divide",
    )
    assert_refused(
        recurjax("evaluate", finished, *words, "--mesh.data", 99), "does not fit 8"
    )


def test_options_of_another_kind_are_refused(finished, requests):
    for words, pattern in [
        (("requests", finished, requests, "--text", "x"), "no option --text"),
        (("requests", finished, requests, "--limit", 0), "--limit: must be >= 1"),
        (("requests", finished, requests.parent / "none"), "no request file matches"),
        ((finished, "--mesh.dat", 2), r"no option --mesh.dat: did you mean --mesh.dat"),
    ]:
        assert_refused(recurjax("evaluate", *words), pattern)


@pytest.mark.parametrize(
    "option, command",
    {
        "--core=x": "`recurjax evaluate core RUN BUNDLE` does that",
        "--ruler": "`recurjax evaluate harness RUN --tasks offline_niah` does that",
        "--longbench": "harness RUN --tasks offline_longbench --longbench FOLDER`",
        "--batches": "`recurjax evaluate text RUN --tokens N` does that",
        "--core-limit": "`recurjax evaluate core RUN BUNDLE --limit N` does that",
        "--table": "`recurjax evaluate table RUN` does that",
        "--limit": "core, recurjax evaluate harness, recurjax evaluate requests RUN",
        "--fewshot=2": "recurjax evaluate harness RUN has it",
        "--no-bos": "recurjax evaluate harness, recurjax evaluate requests RUN has it",
        "--fit-head": "recurjax evaluate exits RUN has it",
    }.items(),
)
def test_an_option_of_another_kind_names_the_command_that_has_it(option, command):
    name = option.partition("=")[0]
    with pytest.raises(UserError, match=f"there is no option {name} here: .*{command}"):
        run(["runs/any", option, "2"])


def test_a_text_may_be_named_and_a_picture_needs_no_positions(finished, text, tmp_path):
    png = tmp_path / "loss.png"
    short = evaluate(finished, "--text", text, "--batch", 4)
    long = evaluate("text", finished, "--text", text, "--batch", 4, "--plot", png)
    assert [part["start"] for part in long.pop("positions")] == [0]
    assert long == short and png.read_bytes().startswith(b"\x89PNG")
