"""The scripts of experiments/latent_recurrent_transformer, as small as they go."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from tests.variants.latent_recurrent_transformer.switches import byte_model

FOLDER = Path(__file__).parents[2] / "experiments" / "latent_recurrent_transformer"
SCRIPTS = (*("latent_shakespeare", "prefill_sweeps", "ratio_sweep", "refinement_cost"),)


@pytest.fixture
def script(quick_compilation, monkeypatch):
    """Imports a script as Python would run it, with its neighbours."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    known = set(sys.modules)
    yield importlib.import_module
    for name in SCRIPTS:
        if name not in known:
            sys.modules.pop(name, None)


def saved(folder, memory):
    model = byte_model(memory)
    experiment = new_experiment(folder, model.config, length=8)
    write_run(folder, model, experiment, ByteTokenizer())
    return str(folder)


@pytest.mark.sweep
def test_as_many_sweeps_as_tokens_are_exact(script, tmp_path, capsys):
    sweeps = script("prefill_sweeps")
    run = saved(tmp_path / "latent", MemoryConfig(sources=(1,)))
    words = ["--run", run, "--rows", "3", "--length", "8", "--sweeps", "0", "2", "8"]
    assert sweeps.main(words) == 0
    rows = re.findall(
        r"^\| (\w+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) % \| (\S+) \|$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ["0", "2", "8", "exact"]
    zero, two, all_of_them, exact = [list(map(float, row[1:])) for row in rows]
    assert zero[1] > 0.1 and zero[2] > 1e-4 and two[2] > 0
    assert max(all_of_them[:2]) < 1e-4 and abs(all_of_them[2]) < 1e-6
    assert exact[:4] == [0, 0, 0, 100] and all_of_them[4] == exact[4] > 4


@pytest.mark.sweep
def test_the_small_set_trains_and_goes_on(script, tmp_path, capsys):
    small = script("latent_shakespeare")
    # base_2x is the quickest to compile.
    words = ["--runs", str(tmp_path), "--steps", "1", "--models", "base_2x"]
    words += ["--seeds", "2"]
    assert small.main(words) == 0
    table = (tmp_path / "results.md").read_text()
    assert table.count("\n") == 3 and "| base_2x |" in table
    assert table in capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [(row["name"], row["seed"]) for row in rows] == [
        ("base_2x", 0),
        ("base_2x", 1),
    ]
    first, other = (row["bits_per_byte"] for row in rows)
    assert first != other and f"{first:.3f}, {other:.3f} |" in table
    assert small.main(words) == 0  # nothing is trained again
    assert (tmp_path / "base_2x" / "log").read_text().count("step 2/2") == 1


@pytest.mark.sweep
def test_the_cost_of_a_refinement_is_tabled(script, capsys):
    assert script("refinement_cost").main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for line in lines[2:]:
        for count, cell in zip((1, 2, 4, 8), line.split("|")[2:], strict=False):
            one, together = map(float, cell.split(","))
            assert 1 <= together < 1.04 and abs(one * count - together) < 0.01


def test_the_ratios_of_the_paper_s_figure_are_one_command(
    script, tmp_path, capsys, monkeypatch
):
    """Training is left out: what each row reaches is made up here."""
    ratios = script("ratio_sweep")
    trained = []

    def sweep(experiments, root, **_):
        trained.extend(experiments)
        return [
            ratios.Reached(run.name, 0, 1, 1, 1.0, 1.0, 0.7 + i / 100, 1.0)
            for i, run in enumerate(experiments)
        ]

    def core(words):
        scores = {"core_zero_memory": {"core": 0.25}, "core": {"core": 0.5}}
        Path(words[-1]).parent.mkdir()
        Path(words[-1]).write_text(json.dumps(scores))

    monkeypatch.setattr(ratios, "sweep", sweep)
    monkeypatch.setattr(ratios.evaluate, "run", core)
    words = ["--runs", str(tmp_path), "--depth", "24", "--core", "bundle"]
    assert ratios.main([*words, "--ratios", "10", "120"]) == 0
    names = [run.name for run in trained]
    assert names == [f"lrt_{m}_24" for m in ratios.MODELS] + ["lrt_base_24_r120"]
    table = (tmp_path / "ratios.md").read_text()
    assert table in capsys.readouterr().out
    assert "| base | 10 | 10 | 0.700 | 0.733 | 0.250 | 0.276 |" in table
    assert "| shared | 10 | 20 | 0.710 | 0.722 | 0.250 | 0.283 |" in table
    assert "| base | 120 | 120 | 0.730 | 0.694 | 0.250 | 0.316 |" in table
    assert (tmp_path / "ratios.png").stat().st_size > 10_000

    options = ratios.Options(small=True, ratios=(3,), models=("shared",))
    (small,) = ratios.rows(options).values()
    assert small.training.steps == round(3 * 304_396 / 2048)
    with pytest.raises(UserError, match="5, 10, 20, 40, 60, 80, 120, not 3"):
        ratios.main(["--ratios", "3"])


def test_mistakes_are_told(script, tmp_path):
    sweeps = script("prefill_sweeps")
    for words, message in [
        (["--rows", "0"], "--rows must be at least 1"),
        (["--run", str(tmp_path / "no")], "no run directory"),
    ]:
        with pytest.raises(UserError, match=message):
            sweeps.main(words)


@pytest.mark.slow
def test_a_run_without_a_memory_is_told(script, tmp_path):
    run = saved(tmp_path / "plain", None)
    with pytest.raises(UserError, match="has no latent memory"):
        script("prefill_sweeps").main(["--run", run])
