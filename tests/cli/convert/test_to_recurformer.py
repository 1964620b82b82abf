"""`recurjax convert to-recurformer`: measured, chosen, written in full, trained
further."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.training.run import load_run
from recurjax.types import Tokens
from tests.cli.commands import assert_refused, recurjax
from tests.variants.transformer import switches as transformer

TEXT = "A rose by any other name would smell as sweet, and so on. " * 20


@pytest.fixture(scope="module")
def base(quick_compilation, tmp_path_factory):
    folder = tmp_path_factory.mktemp("surgery")
    (folder / "text.txt").write_text(TEXT)
    config = dataclasses.replace(transformer.small(key_heads=2), vocabulary=257)
    model = transformer.build(config)
    experiment = new_experiment(folder / "base", model.config, length=32)
    write_run(folder / "base", model, experiment, ByteTokenizer())
    return folder


def convert(folder, out, *options):
    return recurjax("convert", "to-recurformer", folder / "base", out, *options)


@jax.jit
def logits_of(model, ids):
    return model(Tokens(ids), model.init_cache(1, 0))[0]


SMALL = ("--dt-rank", "2", "--state", "3", "--length", "32")


def test_heads_are_measured_chosen_and_replaced(base, tmp_path):
    out = tmp_path / "half"
    code, said, _ = convert(
        base, out, "--beta", "0.5", "--text", base / "text.txt", *SMALL
    )
    assert code == 0 and "4 of 8 heads replaced" in said
    report = json.loads((out / "heads.json").read_text())
    assert np.shape(report["recency_ratio"]) == np.shape(report["ra_i"]) == (2, 4)
    assert report["texts"] == len(TEXT) // 32 and report["window"] == 3
    assert np.shape(report["contribution"]["l2"]["first_token"]) == (2, 4)
    [(length, flops)] = report["training_flops_per_token"].items()
    assert length == "32" and flops["base"] != flops["changed"] > 0
    assert (out / "heads.png").read_bytes()[:4] == b"\x89PNG"
    run = load_run(out)
    assert [list(heads) for heads in run.model.config.stack.replaced] == (
        report["replaced"]
    )
    assert sum(map(len, report["replaced"])) == 4
    ids = np.zeros((1, 5), np.int32)
    assert np.isfinite(np.asarray(logits_of(run.model, ids))).all()
    code, said, _ = recurjax("generate", out, "--prompt", "A", "--max-new-tokens", "3")
    assert code == 0


def test_measuring_stops_once_the_choice_has_settled(base, tmp_path):
    # Row by row the same text: no head becomes more recent than it was.
    text = tmp_path / "text.txt"
    text.write_text("A rose by any other name would " * 100)
    options = ("--beta", "0.5", "--text", text, *SMALL[:-1], "31")
    code, _, said = convert(base, tmp_path / "out", *options)
    assert code == 0 and "settled after 64 texts" in said, said
    assert "at most 100 texts of 31 tokens takes at most" in said
    # As many as are named are read.
    code, _, said = convert(base, tmp_path / "all", *options, "--samples", "70")
    told = json.loads((tmp_path / "all" / "heads.json").read_text())
    assert told["texts"] == 70 and "settle" not in said


def test_a_list_of_heads_is_taken_as_it_is(base, tmp_path):
    heads = tmp_path / "heads.json"
    heads.write_text("[[3, 0], []]")
    code, _, _ = convert(base, tmp_path / "out", "--heads", heads, *SMALL)
    assert code == 0
    assert load_run(tmp_path / "out").model.config.stack.replaced == ((0, 3), ())
    # What it wrote names the same heads again.
    again = tmp_path / "out" / "heads.json"
    code, _, _ = convert(base, tmp_path / "again", "--heads", again, *SMALL)
    first, second = (load_run(tmp_path / name).model for name in ("out", "again"))
    for left, other in zip(
        jax.tree.leaves(first), jax.tree.leaves(second), strict=True
    ):
        np.testing.assert_array_equal(left, other)


def test_a_fitted_start_says_how_well_it_fits(base, tmp_path):
    heads = tmp_path / "heads.json"
    heads.write_text("[[0, 3], []]")
    out = tmp_path / "out"
    text = ("--text", base / "text.txt", "--samples", "9")
    fit = ("--start", "fitted", "--fit-steps", "3", "--fit-rate", "0.01")
    code, _, said = convert(base, out, "--heads", heads, *text, *fit, *SMALL)
    assert code == 0 and "layer 0: Mamba's error" in said and "layer 1" not in said
    [matches] = json.loads((out / "heads.json").read_text())["fits"]
    assert matches["layer"] == 0 and 0 < matches["after"] < matches["before"]


def test_no_head_replaced_is_the_base(base, tmp_path):
    out = tmp_path / "none"
    code, _, _ = convert(base, out, "--beta", "0", "--text", base / "text.txt", *SMALL)
    assert code == 0
    ids = np.arange(12, dtype=np.int32)[None]
    got, want = (
        np.asarray(logits_of(run.model, ids))
        for run in (load_run(out), load_run(base / "base"))
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_a_recursive_model_is_written_out_first(base, tmp_path):
    looped, plain, heads = (tmp_path / name for name in ("looped", "plain", "heads"))
    options = ("--loops", "2", "--rank", "2")
    code, _, err = recurjax("convert", "to-recursive", base / "base", looped, *options)
    assert code == 0, err
    heads.write_text("[[1], []]")
    to_recurformer = ("--heads", heads, *SMALL)
    assert recurjax("convert", "to-transformer", looped, plain)[0] == 0
    cases = ((plain, "[[], []]", "same"), (looped, "[[1], []]", "one"))
    for start, replaced, out in cases:
        heads.write_text(replaced)
        words = ("to-recurformer", start, tmp_path / out, *to_recurformer)
        code, said, err = recurjax("convert", *words)
        assert code == 0, err
        told = "the loops are written out as 2 layers"
        assert (told in err) == (start == looped), err
    assert "1 of 8 heads replaced" in said
    ids = np.arange(9, dtype=np.int32)[None]
    want, same, one = (
        np.asarray(logits_of(load_run(run).model, ids))
        for run in (looped, tmp_path / "same", tmp_path / "one")
    )
    np.testing.assert_allclose(same, want, atol=2e-5)
    assert np.abs(one - want).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "choose the heads to replace"),
        (("--beta", "0.5"), "add --text FILE"),
        (("--beta", "1.5", "--text", "x"), "--beta: must be >= 0 and <= 1, got 1.5"),
        (("--beta", "nan", "--text", "x"), "--beta: must be finite"),
        (("--beta", "0.5", "--text", "nowhere.txt"), "cannot be read: No such file"),
        (
            ("--beta", "0.5", "--text", "{text}", "--conv", "0"),
            "--conv: must be >= 1, got 0",
        ),
        (("--heads", "x", "--fit-samples", "0"), "--fit-samples: must be >= 1, got 0"),
        (("--beta", "0.5", "--text", "{text}", "--length", "9999"), "a sample needs"),
        (
            ("--beta", "0.5", "--text", "{text}", "--window", "0"),
            "--window: must be > 0 and < 1, got 0.0",
        ),
        (
            ("--heads", "{far}", "--start", "fitted"),
            "--start fitted needs a text to fit on",
        ),
        (("--heads", "{far}", "--fit-steps", "0"), "--fit-steps: must be >= 1, got 0"),
        (("--heads", "{far}", "--fit-rate", "nan"), "--fit-rate: must be finite"),
        (("--heads", "{text}"), "the file of --heads .* is not valid JSON"),
        (("--heads", "{bad}"), "a list of heads for each layer"),
        (("--heads", "{far}"), "must be from 0 to 3"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(base, tmp_path, options, said):
    (tmp_path / "bad.json").write_text('{"replaced": [["a"]]}')
    (tmp_path / "far.json").write_text("[[9], []]")
    names = {
        "text": base / "text.txt",
        "bad": tmp_path / "bad.json",
        "far": tmp_path / "far.json",
    }
    words = [word.format(**names) for word in options]
    assert_refused(convert(base, tmp_path / "out", *words), said)
    assert not (tmp_path / "out").exists()
