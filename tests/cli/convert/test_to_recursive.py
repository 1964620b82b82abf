"""`recurjax convert to-recursive` and back: written in full, reported, the same
model."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.losses.divergence import FrozenModel
from recurjax.training.objective import Distilled, Exits, NextToken
from recurjax.training.run import load_run
from recurjax.types import Tokens
from tests.cli.commands import assert_refused, recurjax
from tests.variants.rat import switches as rat
from tests.variants.recurrent_transformer import switches as recurrent
from tests.variants.transformer import switches as transformer

IDS = np.arange(12, dtype=np.int32)[None]


@pytest.fixture(scope="module")
def base(quick_compilation, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recursive")
    for name, config in (
        ("base", transformer.small(key_heads=2, layers=4)),
        ("rat", rat.small(rat.rat(), rat.WINDOW)),
        ("recurrent", recurrent.small()),
    ):
        model = transformer.build(dataclasses.replace(config, vocabulary=257))
        experiment = new_experiment(folder / name, model.config, length=13)
        write_run(folder / name, model, experiment, ByteTokenizer())
    return folder


def convert(source, out, *options):
    return recurjax("convert", "to-recursive", source, out, *options)


def logits(run):
    read = jax.jit(lambda m: m(Tokens(IDS), m.init_cache(1, 0))[0])
    return np.asarray(read(load_run(run).model))


@pytest.mark.slow
def test_a_whole_rank_is_the_model_and_comes_back(base, tmp_path):
    out, back = tmp_path / "out", tmp_path / "back"
    options = ("--loops", "2", "--rank", "99", "--no-tie-norms")
    code, said, _ = convert(base / "base", out, *options)
    assert code == 0 and "parameters" in said
    np.testing.assert_allclose(logits(out), logits(base / "base"), atol=2e-5)
    report = json.loads((out / "report.json").read_text())["matrices"]
    assert len(report) == 4 * 6 and [row["depth"] for row in report[:6]] == [0] * 6
    assert all(row["kept"] == pytest.approx(1, abs=1e-6) for row in report)
    assert (out / "energy.png").read_bytes()[:4] == b"\x89PNG"
    code, said, _ = recurjax("convert", "to-transformer", out, back)
    assert code == 0 and "4 layers" in said
    np.testing.assert_allclose(logits(back), logits(base / "base"), atol=2e-5)


@pytest.mark.slow
def test_mixers_of_rat_come_back_and_are_exported_written_out(base, tmp_path):
    looped, back = tmp_path / "looped", tmp_path / "back"
    options = ("--loops", "2", "--rank", "99", "--no-tie-norms")
    code, said, err = convert(base / "rat", looped, *options)
    assert code == 0 and "parameters" in said, err
    assert load_run(looped).model.config.stack.block_layers == 2
    np.testing.assert_allclose(logits(looped), logits(base / "rat"), atol=2e-5)
    report = json.loads((looped / "report.json").read_text())["matrices"]
    # RAT has q, k, v, out and two gates, attention four maps, the MLP two.
    assert len(report) == 2 * (6 + 4 + 2 * 2)
    assert all(row["kept"] == pytest.approx(1, abs=1e-6) for row in report)
    refused = recurjax("convert", "to-torch", looped, tmp_path / "no", "--no-check")
    assert_refused(refused, "write its layers out with recurjax convert to-transformer")
    code, said, err = recurjax("convert", "to-transformer", looped, back)
    assert code == 0 and "4 layers" in said, err
    assert load_run(back).model.config == load_run(base / "rat").model.config
    np.testing.assert_allclose(logits(back), logits(base / "rat"), atol=2e-5)
    code, _, err = recurjax(
        "convert", "to-torch", back, tmp_path / "torch", "--no-check"
    )
    assert code == 0, err


def test_more_rank_keeps_more(base, tmp_path):
    kept = []
    for rank in ("0", "1", "3"):
        out = tmp_path / rank
        code, _, _ = convert(base / "base", out, "--loops", "2", "--rank", rank)
        assert code == 0
        report = json.loads((out / "report.json").read_text())
        kept.append([row["kept"] for row in report["matrices"] if row["residual"] > 0])
    # Stepwise keeps layers 0 and 3: they have no residual, the others do.
    assert len(kept[0]) == 2 * 6 and max(kept[0]) == 0.0
    assert all(a < b < c for a, b, c in zip(*kept, strict=True))


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("base", ("--loops", "3"), "divide the 4 layers"),
        ("base", ("--loops", "2", "--rank", "-1"), "--rank: must be >= 0, got -1"),
        ("base", ("--loops", "2"), r"--rank is missing: .* \d\d% with --rank 0, "),
        ("recurrent", ("--loops", "2"), "only layers of a TransformerConfig or a"),
        ("rat", ("--loops", "4", "--rank", "0"), "pattern of 2 mixers must divide"),
        ("nowhere", ("--loops", "2"), "no run directory"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    base, tmp_path, source, options, said
):
    out = tmp_path / "out"
    assert_refused(convert(base / source, out, *options), said)
    assert not out.exists()


@pytest.mark.parametrize("distilled", [False, True])
def test_a_run_trained_at_its_exits_is_written_out_with_an_objective_that_fits(
    base, tmp_path, distilled
):
    looped, exits, back = (tmp_path / name for name in ("looped", "exits", "back"))
    assert convert(base / "base", looped, "--loops", "2", "--rank", "0")[0] == 0
    loaded = load_run(looped)
    teacher = FrozenModel(
        run=str(base / "base"), model=load_run(base / "base").model.config
    )
    inner = Distilled(teacher=teacher, weight=0.5) if distilled else None
    objective = Exits(distilled=inner, vocabulary_chunks=2)
    experiment = dataclasses.replace(loaded.experiment, objective=objective)
    write_run(exits, loaded.model, experiment, ByteTokenizer())
    code, _, message = recurjax("convert", "to-transformer", exits, back)
    wanted = inner or NextToken()
    named = type(wanted).__name__
    assert code == 0 and f"its objective is {named}: Exits does not fit" in message
    got = load_run(back).experiment.objective
    assert got == dataclasses.replace(wanted, vocabulary_chunks=2)


def test_only_a_recursive_model_is_written_out(base, tmp_path):
    answer = recurjax("convert", "to-transformer", base / "base", tmp_path / "out")
    assert_refused(answer, "the model must be recursive")


def test_the_report_has_the_loss_before_and_after_on_a_text(base, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("It was a bright cold day in April. " * 20)
    options = ("--loops", "3", "--rank", "0", "--keep", "evenly", "--init", "average")
    options += ("--norms", "choice", "--text", text, "--samples", "3", "--length", "20")
    code, said, err = convert(base / "base", out, *options)
    assert code == 0 and "nats per token" in said, err
    report = json.loads((out / "report.json").read_text())
    assert report["tokens"] == 3 * 19
    assert report["loss_before"] > 0 and report["loss_after"] > 0
    assert report["loss_before"] != report["loss_after"]
    assert load_run(out).model.config.stack.transformer.layers == 3
    refused = convert(base / "base", tmp_path / "no", "--loops", "3")
    assert_refused(refused, "divide the 4 layers")
    assert not (tmp_path / "no").exists()
