"""The bench: rows, report, and what it must not import."""

import json
import subprocess
import sys

import pytest

from recurjax.bench import data, generate, machine, timing, transformer
from recurjax.bench.report import report
from recurjax.cli.bench import BENCHES
from recurjax.cli.main import main
from recurjax.data.corpora import embedded_text
from tests.cli.commands import assert_refused, recurjax
from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]

KINDS = ("text", "prepared")
TINY = {"B": 2, "T": 8, "D": 128, "L": 1, "V": 64}


def test_every_pass_has_a_row_with_the_promised_fields(monkeypatch):
    monkeypatch.setattr(transformer, "SMALL", TINY)
    monkeypatch.setattr(transformer, "_PREFIX", 16)
    rows = list(transformer.rows(large=False, dtype="float32", repeats=2))
    passes = {"forward", "forward_backward", "train_step", "prefill", "decode"}
    assert {row.name.rpartition("/")[2] for row in rows} == passes
    written = json.loads(json.dumps(report(rows)))
    assert {"device", "versions", "rows"} == set(written)
    fields = {"name", "shape", "dtype", "median_ms", "min_ms", "tokens_per_s"}
    for row in written["rows"]:
        assert set(row) == fields
        assert 0 < row["min_ms"] <= row["median_ms"]
        assert all(len(letter) == 1 for letter in row["shape"])
    assert "faster with the cache" in transformer.summary(rows)


def test_an_engine_s_passes_and_the_machine_s_limits_have_rows(
    unoptimized, monkeypatch
):
    shape = {"L": 2, "D": 8, "H": 2, "K": 1, "E": 4, "F": 8, "V": 16}
    monkeypatch.setattr(generate, "SHAPE", shape)
    monkeypatch.setattr(generate, "_PROMPTS", ((2, 4),))
    monkeypatch.setattr(generate, "_NEW", 3)
    monkeypatch.setattr(machine, "_WIDTH", 8)
    monkeypatch.setattr(machine, "_READ", {"N": 16, "M": 8})
    for bench, names in (
        (generate, ["generate/prefill", "generate/decode"]),
        (machine, ["machine/products", "machine/read"]),
    ):
        rows = list(bench.rows(large=False, dtype="bfloat16", repeats=1))
        assert [row.name for row in rows] == names
        assert bench.summary(rows)


def test_rows_are_written_as_they_are_measured(monkeypatch, tmp_path):
    def two(**_):
        yield timing.row("a/b/c", {"B": 1}, "float32", [0.1], tokens=1)
        assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 1
        yield timing.row("a/b/d", {"B": 1}, "float32", [0.1], tokens=1)

    monkeypatch.setattr(machine, "rows", two)
    assert main(["bench", "machine", "--json", str(tmp_path / "rows.json")]) == 0
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 2


def test_a_row_is_the_median_and_its_rate():
    row = timing.row("a/b/c", {"B": 4}, "float32", [0.1, 0.4, 0.2], tokens=100)
    assert row.median_ms == pytest.approx(200)
    assert row.min_ms == pytest.approx(100)
    assert row.tokens_per_s == pytest.approx(500)


def test_warm_up_calls_are_not_timed():
    calls = []
    times = timing.repeat(lambda: calls.append(1), repeats=3, warmup=2)
    assert len(times) == 3
    assert len(calls) == 5


def test_the_variants_bench_needs_no_data_package():
    code = (
        "import sys; import recurjax.bench.transformer, recurjax.cli.bench\n"
        "names = ('grain', 'tensorflow_datasets', 'array_record', 'recurjax.data')\n"
        "loaded = [name for name in names if name in sys.modules]\n"
        "sys.exit(', '.join(loaded) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_bench_is_named_with_the_nearest(capsys):
    assert main(["bench", "transfomer"]) == 2
    assert "did you mean transformer" in capsys.readouterr().err
    assert main(["bench", "transformer", "--repeats", "0"]) == 2
    assert "--repeats: must be >= 1" in capsys.readouterr().err


def test_five_parts_are_timed_beside_one_corpus(monkeypatch):
    monkeypatch.setattr(data, "SMALL", {"B": 2, "T": 16})
    monkeypatch.setattr(data, "_BATCHES", 2)
    monkeypatch.setattr(data, "embedded_text", lambda: embedded_text()[:100_000])
    rows = list(data.rows(large=False, dtype="float32", repeats=1))
    kinds = [f"data/{k}_{p}" for p in ("concat", "best_fit") for k in KINDS]
    names = [f"{kind}/{n}" for kind in kinds for n in ("one_corpus", "five_parts")]
    assert [row.name for row in rows] == names
    summary = data.summary(rows).splitlines()
    shares = [rows[i + 1].tokens_per_s / rows[i].tokens_per_s for i in (0, 2, 4, 6)]
    assert summary == [
        f"{kind}: five parts at {share:.2f} of one corpus' rate"
        for kind, share in zip(kinds, shares, strict=True)
    ]


def test_a_folder_that_is_not_there_is_told_before_anything_is_measured(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(BENCHES, "data", "reached")
    answer = recurjax("bench", "data", "--json", tmp_path / "none" / "rows.json")
    assert_refused(answer, f"--json: there is no directory {tmp_path}/none")
