"""Ours against PyTorch's: tables, calls of the other interpreter, equal outputs."""

import json

import numpy as np
import pytest

from experiments import compare_with_torch as script
from recurjax.errors import UserError
from tests.torch_python import PYTHON

FEW = ["--turns", "1", "--repeats", "1", "--threads", "1"]
SIZES = {
    "attention": ["--width", "8", "--heads", "2"],
    "transformer": ["--width", "8", "--heads", "2", "--batch", "1"],
    "mamba": ["--width", "8"],
}


@pytest.mark.torch("transformers")
@pytest.mark.slow
@pytest.mark.parametrize("case", SIZES)
def test_pytorch_gives_our_output(quick_compilation, case, capsys):
    words = [case, "--torch-python", PYTHON, "--lengths", "9", *SIZES[case], *FEW]
    assert script.main(words) == 0
    output = capsys.readouterr().out
    assert float(output.split("apart by ")[1].split()[0]) < 1e-5
    rows = [line.split(" | ")[0][2:] for line in output.splitlines()[3:-1]]
    assert rows == list(dict.fromkeys([script.CASES[case].sides[0].name, *rows]))
    assert {"ours", "attention"} & set(rows)


def test_ratios_are_over_the_reference_and_missing_passes_are_blank():
    times = {(side, what): 6.0 for side in ("transformers", "ours") for what in PASSES}
    times["ours", "forward"] = 1.5
    del times["transformers", "forward_backward"]
    table = script.markdown(script.CASES["mamba"], 8, times).splitlines()
    assert table[2:] == [
        "| transformers | 6.00 (4.00) |  |",
        "| ours | 1.50 (1.00) | 6.00 (1.00) |",
    ]


PASSES = script.PASSES


@pytest.fixture
def played(monkeypatch):
    """Answers for another interpreter; collects the requests."""
    questions = []

    def answer_of(python, file, peer, question, *, environment):
        assert file.is_file()
        question = json.loads(question)
        weights = np.load(question["arrays"]).files
        questions.append((peer, question["eager"], weights, environment))
        return dict(answer_of.answer)

    monkeypatch.setattr(script, "answer_of", answer_of)
    return answer_of, questions


def test_the_authors_layer_is_timed_eager_and_compiled(
    quick_compilation, played, tmp_path, capsys
):
    answer_of, questions = played
    answer_of.answer = {"difference": 0.0, "forward": 1e9, "forward_backward": 2e9}
    (tmp_path / "olmo").mkdir()
    words = ["tiled", "--torch-python", "python", "--width", "8", "--heads", "2"]
    words += ["--batch", "1", "--lengths", "8", *FEW, "--checkout"]
    assert script.main([*words, str(tmp_path)]) == 0
    path = {"PYTHONPATH": str(tmp_path)}
    for (peer, eager, weights, environment), want in zip(
        questions, (True, False), strict=True
    ):
        assert (peer, eager) == ("tiled", want)
        assert {"slopes", "mlp.w_up", "x", "y"} <= set(weights)
        off = {"TORCHDYNAMO_DISABLE": "1"} if want else {}
        assert environment == path | off
    rows = capsys.readouterr().out.splitlines()[4:]
    names = [f"the authors' tiled layer, {how}" for how in ("eager", "compiled")]
    assert [row.split(" | ")[0][2:] for row in rows[:3]] == [*names, "ours"]
    assert rows[2].count("(1.00)") == 2
    with pytest.raises(UserError, match="is not a checkout .* it has no olmo"):
        script.main([*words, str(tmp_path / "olmo")])


@pytest.mark.slow
def test_a_step_is_compared_with_nanochat_s(
    quick_compilation, played, tmp_path, capsys
):
    answer_of, questions = played
    # Two embeddings, one of values, the block's 12 D^2, its gate, two scalars.
    counted = 3 * 16 * 32 + 12 * 32**2 + 32 + 2
    answer_of.answer = {"parameters": counted}
    answer_of.answer |= {"forward_backward": 1e9, "train_step": 2e9}
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "gpt.py").touch()
    words = ["nanochat", "--torch-python", "python", "--batch", "1", "--width", "32"]
    words += ["--layers", "1", "--vocabulary", "16", "--lengths", "8", *FEW]
    words.append("--checkout")
    assert script.main([*words, str(tmp_path)]) == 0
    assert [eager for _, eager, _, _ in questions] == [True, False]
    rows = capsys.readouterr().out.splitlines()
    names = ["nanochat, eager", "nanochat, compiled", "ours"]
    assert [row.split(" | ")[0][2:] for row in rows[2:5]] == names
    assert rows[4].count("(1.00)") == 2
    answer_of.answer["parameters"] += 1
    with pytest.raises(UserError, match="eager's model has 13,859 parameters"):
        script.main([*words, str(tmp_path)])
    with pytest.raises(UserError, match="is not a checkout"):
        script.main([*words, str(tmp_path / "nanochat")])
