"""`recurjax describe`, `runs` and `report`."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from recurjax.cli.inspect.describe import parameter_rows
from recurjax.cli.inspect.report import _duration, _read, report
from recurjax.experiment import read_experiment, write_experiment
from recurjax.inference.compute_dtype import cache_dtype
from recurjax.inference.engine.memory import in_words, state_size
from recurjax.model import Decoder, count_parameters
from recurjax.training.optimizers import AdamW, MuonAdamW
from tests.cli.commands import TINY, assert_refused, recurjax
from tests.variants.latent_recurrent_transformer import switches as latent
from tests.variants.rat import switches as rat
from tests.variants.recurformer import switches as recurformer
from tests.variants.recurrent_transformer import switches as recurrent
from tests.variants.relaxed_recursive_transformer import switches as recursive
from tests.variants.transformer import switches as transformer

WITHOUT_JAX = """
import sys
sys.modules["jax"] = None
from recurjax.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def without_jax(*words):
    """Runs a command in a process that cannot import jax; returns its output."""
    command = [sys.executable, "-c", WITHOUT_JAX, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_runs_are_listed_without_jax(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "sweep" / "tiny")
    (tmp_path / "sweep" / "new").mkdir()
    shutil.copy(finished / "config.json", tmp_path / "sweep" / "new")
    header, new, tiny = without_jax("runs", tmp_path).splitlines()
    assert header.split() == ["run", "step", "loss", "age", "size"]
    assert new.split()[:3] == ["sweep/new", "0/12", "-"]
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    loss = [row["loss"] for row in rows if row["kind"] == "validation"][-1]
    assert tiny.split()[:3] == ["sweep/tiny", "12/12", f"{loss:.4f}"]


def test_a_folder_without_runs_is_one_sentence(tmp_path):
    assert_refused(
        recurjax("runs", tmp_path), "holds no run: start one with recurjax train"
    )
    near = recurjax("runs", tmp_path.with_name(tmp_path.name[:-1]))
    assert_refused(near, f"did you mean {tmp_path}")
    assert_refused(recurjax("runs", "a", "b"), "takes one folder, got a b")


VARIANTS = {
    "transformer": transformer,
    "recurrent": recurrent,
    "latent": latent,
    "rat": rat,
    "recursive": recursive,
    "recurformer": recurformer,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_description_counts_what_the_model_has(variant):
    optimizers = (AdamW(learning_rate=1e-3), MuonAdamW())
    for config in list(VARIANTS[variant].SWITCHES.values())[:3]:
        model = jax.eval_shape(lambda config=config: Decoder(config, rngs=nnx.Rngs(0)))
        for optimizer in optimizers:
            rows = parameter_rows(model, optimizer)
            assert sum(row.size for row in rows) == count_parameters(config).total
            for row in rows:
                sizes = [int(part.partition("=")[2] or 1) for part in row.shape.split()]
                assert np.prod(sizes) * row.arrays == row.size
        length = min(64, config.max_length or 64)
        cache = model.init_cache(1, length, cache_dtype(model))
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        assert state_size(model, length).state == held


def test_a_model_is_described(finished):
    code, out, err = recurjax("describe", finished, "--training.train-only", "mlp")
    assert (code, err) == (0, "")
    config = read_experiment(finished / "config.json").model
    assert f" {count_parameters(config).total:,}\n" in out
    cells = " ".join(out.split())
    assert "attention.w_k L=2 D=16 H=2 E=4 D:fsdp H:tensor frozen float32" in cells
    assert "mlp.w_up L=2 D=16 F=32 D:fsdp F:tensor adamw, decay float32" in cells
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    for tokens in (1024, 4096, 65_536):
        assert in_words(state_size(model, tokens)) in out
    assert recurjax("describe", TINY)[1].splitlines()[-3:] == out.splitlines()[-3:]


def test_what_is_not_there_gets_the_closest_name(finished):
    near = finished.with_name("tinny")
    assert_refused(recurjax("describe", near), f"did you mean {finished}")
    assert_refused(recurjax("report", near), f"did you mean {finished}")
    assert_refused(recurjax("describe", "quickstrat"), "did you mean quickstart")
    assert_refused(recurjax("report", finished, finished), "name each run once")


HOSTILE = "<script>alert(1)</script> & $x^"


@pytest.fixture
def hostile(finished, tmp_path):
    """A run whose name, samples, evaluations and settings hold markup."""
    root = shutil.copytree(finished, tmp_path / "<b>$a_{$")
    experiment = read_experiment(root / "config.json")
    evaluation = replace(experiment.evaluation, sample_prompts=(HOSTILE,))
    write_experiment(replace(experiment, evaluation=evaluation), root / "config.json")
    (root / "samples.txt").write_bytes(
        f"=== step 4 ===\nold\n\n=== step 12 ===\n{HOSTILE}\0\x1b\xff".encode()
    )
    row = {"step": 12, "task": HOSTILE, "metric": HOSTILE, "value": 1.0, "n": 3}
    (root / "evaluations.jsonl").write_text(
        json.dumps(row | {"settings": {HOSTILE: HOSTILE}}) + "\n"
    )
    with (root / "starts.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "commit": HOSTILE}) + "\nnot JSON\n")
    return root


def test_a_report_escapes_everything_and_needs_no_network(finished, hostile, tmp_path):
    out = tmp_path / "report.html"
    code, said, err = recurjax("report", finished, hostile, "--out", out)
    assert (code, err) == (0, "") and said.startswith(f"{out}: ")
    page = out.read_text()
    assert "<script" not in page and "<b>" not in page and "://" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 6
    assert page.count("src=") == page.count('src="data:image/svg+xml;base64,') >= 6
    for heading in ("Summary", "Settings that differ", "Curves", "Samples"):
        assert f"<h2>{heading}</h2>" in page
    for heading in ("Evaluations", "Environment", "All settings"):
        assert f"<h2>{heading}</h2>" in page
    assert "<code>evaluation.sample_prompts" in page and "old" not in page
    total = count_parameters(read_experiment(finished / "config.json").model).total
    assert f"<td>{total:,}</td>" in page
    assert page.count("\0") + page.count("\x1b") == 0


def test_a_report_of_many_long_runs_is_under_a_megabyte(finished, tmp_path):
    roots = []
    losses = np.random.default_rng(0).random(300)
    for number in range(8):
        roots.append(tmp_path / f"run{number}")
        roots[-1].mkdir()
        shutil.copy(finished / "config.json", roots[-1])
        rows = [
            {"step": step + 1, "kind": kind, "loss": loss, "tokens_per_second": 128.0}
            for step, loss in enumerate(losses)
            for kind in ("train", "validation")
        ]
        rows[6]["loss"] = None  # a loss that was not finite
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (roots[-1] / "metrics.jsonl").write_text(text)
        (roots[-1] / "samples.txt").write_text("=== step 9 ===\n" + "word " * 40_000)
    assert 100_000 < len(report(roots).encode()) < 1_000_000


@pytest.mark.parametrize(
    "seconds, text",
    [(119.94, "119.9 s"), (120, "2.0 min"), (7199, "120.0 min"), (7200, "2.0 h")],
)
def test_a_duration_has_the_unit_that_reads_best(seconds, text):
    assert _duration(seconds) == text


def test_training_time_adds_up_over_the_starts_of_a_run(finished, tmp_path):
    """Rates are means since the first step of each start, which compiled."""
    root = shutil.copytree(finished, tmp_path / "run")
    tokens = 8 * 16
    rates = {2: 10.0, 3: 10.0, 5: 20.0, 7: 20.0}  # tokens each second; resumed at 3
    rows = [
        {"step": step, "kind": "train", "tokens_per_second": rate * tokens}
        for step, rate in rates.items()
    ]
    (root / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (root / "starts.jsonl").write_text('{"step": 0}\n{"step": 3}\n')
    [run] = _read([root])
    seconds = 3600 * run.hours(np.array([0.0, 2.0, 3.0, 5.0, 7.0]))
    np.testing.assert_allclose(seconds, [0.0, 0.1, 0.2, 0.25, 0.35])
