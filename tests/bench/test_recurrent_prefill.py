"""The op's bench: rows by backend, and block sizes tuned into a file that is read."""

import json
from functools import partial

import jax
import pytest

from pallas_kernels.measured_sizes import VARIABLE
from recurjax.bench import op_by_backend, timing, tuning
from recurjax.bench import recurrent_prefill as bench
from recurjax.cli.main import main
from recurjax.run_table import load_experiment
from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]

SHAPE = {"B": 1, "T": 16, "D": 8, "H": 2}


@pytest.fixture
def tiny(unoptimized, monkeypatch):
    monkeypatch.setattr(bench, "SMALL", (SHAPE,))
    sizes = {"tile": (4, 8), "keys": (4,)}
    monkeypatch.setattr(bench, "CANDIDATES", {"xla": sizes})


def tune(file, *words) -> int:
    return main(["bench", "recurrent_prefill", "--tune", str(file), *words])


def test_every_backend_that_serves_has_both_passes(tiny):
    rows = list(bench.rows(large=False, dtype="float32", repeats=1))
    passes = [f"recurrent_prefill/xla/{what}" for what in op_by_backend.PASSES]
    assert [row.name for row in rows] == passes
    assert bench.summary(rows) == ""


def test_the_fastest_backend_is_named_where_there_are_several():
    rows = [
        timing.row(
            f"recurrent_prefill/{name}/forward_backward", SHAPE, "f", [s], tokens=1
        )
        for name, s in (("triton", 0.002), ("xla", 0.001))
    ]
    told = "B 1, T 16, D 8, H 2, both passes: xla 1.0 ms, triton 2.0 ms"
    assert bench.summary(rows) == told


def test_tuned_sizes_go_into_a_file_that_programs_read(
    tiny, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "tiles.json"
    # No clock: tiles of 4 are fastest, keys make no difference.
    seen = []

    def time(calls, **_):
        seen.append(list(calls))
        return {name: [0.5 if name in (4, "best") else 1.0] for name in calls}

    monkeypatch.setattr(op_by_backend, "in_turns", time)
    assert tune(file) == 0
    assert seen == [[None, 4, 8], [None, 4], ["heuristic", "best"]]
    (entry,) = json.loads(file.read_text())["sizes"]
    assert entry["sizes"] == {"tile": 4, "keys": 4}
    assert (entry["backend"], entry["ms"], entry["heuristic_ms"]) == ("xla", 500, 1000)
    assert f"{VARIABLE}={file}" in capsys.readouterr().out
    monkeypatch.setenv(VARIABLE, str(file))
    call = bench.call_of(bench._layer(SHAPE), 1, 16, "float32")
    # Traced anew: jax knows a function again.
    loops = str(jax.make_jaxpr(partial(call.function))(*call.arrays))
    monkeypatch.delenv(VARIABLE)
    assert loops != str(jax.make_jaxpr(partial(call.function))(*call.arrays))


def test_what_is_not_faster_in_the_end_is_not_kept():
    found = tuning.tune_one_by_one(
        op="an_op",
        backend="xla",
        shape={},
        candidates={"tile": (4,)},
        make=lambda sizes: lambda: sizes,
        time=lambda calls: {name: [0.5 if name == 4 else 1.0] for name in calls},
    )
    assert (found.sizes, found.ms) == ({}, found.heuristic_ms)


def test_what_a_device_cannot_have_is_told_and_left_out(capsys):
    def make(sizes):
        if sizes.get("rows") == 64:
            raise NotImplementedError("64 rows need 9 bytes, the device has 8")
        return lambda: sizes

    found = tuning.tune_one_by_one(
        op="an_op",
        backend="triton",
        shape={},
        candidates={"rows": (32, 64)},
        make=make,
        time=lambda calls: {
            name: [0.5 if name in (32, "best") else 1.0] for name in calls
        },
    )
    assert found.sizes == {"rows": 32}
    told = capsys.readouterr().err
    assert "an_op: rows=64 cannot be: 64 rows need 9 bytes" in told


def test_a_run_s_own_layer_is_tuned(tiny, tmp_path, monkeypatch):
    made, call_of = [], bench.call_of

    def tiny_instead(*given):
        made.append(given)
        return call_of(bench._layer(SHAPE), 1, 16, "float32")

    monkeypatch.setattr(bench, "call_of", tiny_instead)
    monkeypatch.setattr(bench, "CANDIDATES", {"xla": {"tile": (4,)}})
    run = "recurrent_transformer:shakespeare_recurrent"
    assert tune(tmp_path / "tiles.json", "--experiment", run, "--repeats", "1") == 0
    experiment = load_experiment(run)
    ((config, rows, length, dtype),) = made
    assert config == experiment.model.stack and dtype == experiment.model.dtype
    training = experiment.training
    assert (rows, length) == (training.batch // jax.device_count(), training.length)


def test_entries_of_other_shapes_and_devices_stay(tmp_path):
    def found(ms, **changes):
        given = {"op": "o", "backend": "xla", "device": "cpu", "sizes": {}, "jax": "1"}
        given |= {"shape": {"batch": 1, "positions": 8}, "heuristic_ms": 2.0}
        return tuning.Tuned(**(given | changes), ms=ms)

    file = tmp_path / "tiles.json"
    tuning.keep([found(1.0), found(2.0, device="a GPU")], file)
    tuning.keep([found(3.0)], file)
    entries = json.loads(file.read_text())["sizes"]
    assert [(e["device"], e["ms"]) for e in entries] == [("cpu", 3.0), ("a GPU", 2.0)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--experiment", "rat:x"), "name a file with --tune too"),
        (("--tune", "FILE", "--json", "x.json"), "leave --json out"),
        (("--tune", "NOWHERE"), "there is no folder"),
        (("--tune", "OTHER"), "holds no block sizes: name another file"),
        (
            ("--tune", "FILE", "--experiment", "rat:shakespeare_rat16"),
            "only a Recurrent Transformer has the op",
        ),
    ],
)
def test_what_cannot_be_tuned_is_told(words, message, tmp_path, capsys, tiny):
    (tmp_path / "other.json").write_text('{"rows": []}')
    paths = {
        "FILE": tmp_path / "tiles.json",
        "OTHER": tmp_path / "other.json",
        "NOWHERE": tmp_path / "gone" / "tiles.json",
    }
    words = [str(paths.get(word, word)) for word in words]
    assert main(["bench", "recurrent_prefill", *words]) == 2
    assert message in capsys.readouterr().err
    assert main(["bench", "rat", "--tune", str(paths["FILE"])]) == 2
    assert (
        "rat has no block sizes to tune: recurrent_prefill" in capsys.readouterr().err
    )
