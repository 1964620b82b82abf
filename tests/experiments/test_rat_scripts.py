"""The scripts of experiments/rat, as small as they go."""

import importlib
import json
import math
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from recurjax.errors import UserError

FOLDER = Path(__file__).parents[2] / "experiments" / "rat"
SCRIPTS = (
    *("rat_shakespeare", "length_generalisation", "throughput", "latency", "cost"),
    *("device_memory", "sft_sets"),
)


@pytest.fixture
def script(quick_compilation, monkeypatch):
    """Imports a script as Python would run it, with its neighbours."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    known = set(sys.modules)
    yield importlib.import_module
    for name in (*SCRIPTS, "paper_latency"):
        if name not in known:
            sys.modules.pop(name, None)


def test_the_public_sets_become_prompts_and_answers(script, tmp_path, capsys):
    document = {"summary": {"text": "S"}, "text": "T"}
    answers = [{"text": "yes"}, {"text": "no"}]
    story = {"document": document, "question": {"text": "Q?"}, "answers": answers}
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([story]), tmp_path / "n.parquet"
    )
    meeting = {
        "meeting_transcripts": [{"speaker": "A", "content": "hi"}],
        "general_query_list": [{"query": "G?", "answer": "g"}],
        "specific_query_list": [{"query": "P?", "answer": "p"}],
    }
    (tmp_path / "q.jsonl").write_text(json.dumps(meeting) + "\n")
    article = {"title": "W?", "article": "text", "summary": "sum"}
    (tmp_path / "w.jsonl").write_text(json.dumps(article) + "\n")
    words = ["--narrativeqa", str(tmp_path / "n*.parquet"), "--out", str(tmp_path)]
    words += ["--qmsum", str(tmp_path / "q.jsonl"), "--wikisum"]
    assert script("sft_sets").main([*words, str(tmp_path / "w.jsonl")]) == 0
    assert capsys.readouterr().out.count(" examples\n") == 5
    expected = {
        "narrativeqa_summary": [("Story: S", "Q?", "yes"), ("Story: S", "Q?", "no")],
        "narrativeqa_full": [("Story: S\n\nT", "Q?", a) for a in ("yes", "no")],
        "narrativeqa_passage": [("Story: T", "Q?", a) for a in ("yes", "no")],
        "qmsum": [("Transcript: A: hi", "G?", "g"), ("Transcript: A: hi", "P?", "p")],
        "wikisum": [("Article: text", "W?", "sum")],
    }
    for task, rows in expected.items():
        lines = (tmp_path / task / "train.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [
            {"prompt": f"{begin}\n\nQuestion: {q}\n\nAnswer:", "answer": f" {answer}"}
            for begin, q, answer in rows
        ]
    with pytest.raises(UserError, match="no file matches nowhere"):
        script("sft_sets").main(["--qmsum", "nowhere"])


def test_the_cost_table_counts_caches_and_products(script, capsys, tmp_path):
    cost = script("cost")
    assert cost.main(["--png", str(tmp_path / "cost.png")]) == 0
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert said.count("\n") == 2 * (2 + 8) + 1
    result, D = cost.costs(), 2048
    for place, length in enumerate(cost.LENGTHS):
        rows = {name: row[place] for name, row in result.items()}
        places = 4 + 4  # a row's position and the layer's number
        assert rows["attention"].cache_bytes == length * 2 * D * 2 + places
        ends = length // 16 * 2 * D * 2
        assert rows["RAT(16)"].cache_bytes == ends + 2 * D * 4 + places
        assert rows["RNN"].cache_bytes == D * 4 + places
        assert rows["window 1024"].cache_bytes == (
            min(length, 1025) * 2 * D * 2 + places
        )
        assert rows["attention"].flops == 6 * 4 * D * D + 12 * D * length
        assert rows["RAT(16)"].flops == 6 * 4.25 * D * D + 12 * D * length / 16
        assert rows["RNN"].flops == 6 * 4 * D * D


def test_the_papers_tables_are_whole(script):
    paper = script("paper_latency").PAPER
    assert len(paper) == 25 * 7
    assert paper["training", "attention", None, 262144] == "3417.48"
    assert paper["decode", "rat16", 512, 4096] == "0.75"
    assert paper["decode", "rat64", 1024, 262144] == "13.45"
    assert paper["forward", "rat128", None, 65536] == "46.67"


@pytest.mark.sweep
def test_the_small_set_trains_resumes_and_reads_on(script, capsys, tmp_path):
    """Two models, two steps; then the loss by position of the same runs."""
    small = script("rat_shakespeare")
    kept = ("rnn", "rat16_swa")
    words = ["--runs", str(tmp_path), "--steps", "2", "--models", *kept]
    assert small.main([*words, "--seeds", "1"]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["name"] for row in rows] == list(kept)
    assert all(row["tokens"] == 2 * 8 * 256 for row in rows)
    assert all(3 < row["bits_per_byte"] < 9 for row in rows)
    table = (tmp_path / "results.md").read_text()
    assert table in capsys.readouterr().out and table.count("\n") == 4
    (tmp_path / "results.json").unlink()
    assert small.main([*words, "--seeds", "1"]) == 0  # nothing is trained again
    assert json.loads((tmp_path / "results.json").read_text()) == rows
    log = (tmp_path / "rnn" / "log").read_text()
    assert log.count("step 2/2") == 1

    further = script("length_generalisation")
    assert further.main([*words, "--times", "2", "--positions", "128"]) == 0
    curves = json.loads((tmp_path / "length.json").read_text())
    assert tuple(curves) == kept
    spans = [[part["start"], part["stop"]] for part in curves["rnn"]]
    assert spans == [[0, 128], [128, 256], [256, 384], [384, 512]]
    assert (tmp_path / "length.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "| run | 0 to 255 | 256 to 511 |" in said


@pytest.mark.sweep
def test_throughput_fills_caches_and_generates(script, tmp_path):
    words = ["--tiny", "--lengths", "48", "--new", "8", "--most", "2"]
    words += ["--models", "rat16_swa", "rnn", "--json", str(tmp_path / "out.json")]
    assert script("throughput").main(words) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["rat16_swa", "rnn"]
    for row in rows:
        assert (row["prompt"], row["new"], row["batch"]) == (40, 8, 2)
        want = row["batch"] * row["new"] / row["decode_seconds"]
        assert math.isclose(row["tokens_per_second"], want)
        assert row["with_prefill"] < row["tokens_per_second"]
    assert rows[0]["cache_bytes"] > rows[1]["cache_bytes"]


@pytest.mark.slow
def test_throughputs_prefill_in_pieces_is_the_whole(script, monkeypatch):
    """The token that follows the prompt does not depend on the pieces."""
    jax = importlib.import_module("jax")
    throughput = script("throughput")
    model = throughput._model("rat16", 48, tiny=True)
    ids = jax.random.randint(jax.random.key(1), (2, 40), 0, 256)
    whole, _ = throughput._read(model, ids, model.init_cache(2, 48))
    cache = model.init_cache(2, 48)
    for start in range(0, 40, 20):
        last, cache = throughput._read(model, ids[:, start : start + 20], cache)
    assert last.tolist() == whole.tolist()


@pytest.mark.sweep
def test_latency_writes_every_cell(script, tmp_path):
    words = ["--tiny", "--out", str(tmp_path), "--lengths", "64", "--tokens", "128"]
    words += ["--batches", "1", "2", "--repeats", "1"]
    words += ["--layers", "rnn", "rat64", "attention"]
    assert script("latency").main(words) == 0
    rows = json.loads((tmp_path / "latency.json").read_text())["rows"]
    assert len(rows) == 3 * (2 + 2)
    assert all(row["ms"] > 0 for row in rows)
    table = (tmp_path / "latency.md").read_text()
    assert "| rat64, batch 2 | " in table and table.count("| attention | ") == 2


def test_a_wrong_option_is_told(script, tmp_path):
    UserError = importlib.import_module("recurjax.errors").UserError
    for name, words, message in [
        ("throughput", ["--models", "rat17"], "there is no rat17"),
        ("throughput", ["--new", "9999"], "--new must be between"),
        ("latency", ["--layers", "lstm"], "there is no lstm"),
        ("latency", ["--out", str(tmp_path / "no")], "there is no directory"),
        ("latency", ["--tokens", "10"], "at least the longest"),
        ("length_generalisation", ["--times", "0"], "must be at least 1"),
        ("rat_shakespeare", ["--step", "1"], "did you mean --steps"),
    ]:
        with pytest.raises(UserError, match=message):
            script(name).main(words)
