"""Fine-tuning on needles: the problems it writes, and the run that learns them."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest

from recurjax.data.config import Bpe, TokenizerFile
from recurjax.data.corpora import embedded_text
from recurjax.data.dataset import open_dataset
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.evaluation.offline_tasks import needles
from recurjax.evaluation.offline_tasks.needles import NEEDLES
from recurjax.types import IGNORED
from tests.training.tiny_experiment import config

FOLDER = Path(__file__).parents[2] / "experiments" / "rat"
TOKENS = 1500


@pytest.fixture
def script(monkeypatch):
    words = tuple(f"word{number}" for number in range(200))
    monkeypatch.setattr(needles, "wonderwords", lambda name: words)
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    yield importlib.import_module("sft_needles")
    sys.modules.pop("sft_needles", None)


def test_an_epoch_learns_the_answers_of_all_kinds_of_needles(script, tmp_path):
    file = tmp_path / "out" / "needles.jsonl"
    count = script.write_problems(
        file,
        ByteTokenizer(),
        kinds=tuple(NEEDLES),
        tokens=TOKENS,
        rows=2,
        text=embedded_text(),
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert count == len(lines) == 2 * len(NEEDLES)
    assert {line["answer"].count(",") for line in lines} == {0, 3}
    assert all(line["answer"][0] == " " for line in lines)
    options = script.Options(run=Path("base"), out=tmp_path, rows=2, batch=4)
    tiny = dataclasses.replace(config(), name="base")
    run = script.fine_tuned(tiny, options, file)
    # 98 of 100 of 16 problems, four a step.
    assert (run.training.steps, run.training.start_from) == (4, "base")
    assert (run.optimizer.learning_rate, run.optimizer.weight_decay) == (1e-5, 0.01)
    data = open_dataset(run.data)
    assert (data.cut, len(data.examples)) == (15, 16)
    batch = next(iter(data.loader("train", length=TOKENS, batch=15)))
    asked = (batch["targets"] != IGNORED).sum()
    answers = [line["answer"] for line in lines[:15]]
    assert asked == sum(len(answer) + 1 for answer in answers)


def test_some_kinds_are_learned_with_their_problems(script, tmp_path):
    kinds = ("niah_single_1", "niah_multikey_2")
    options = script.Options(
        run=Path("base"), out=tmp_path, kinds=kinds, loss="all", rows=3, batch=2
    )
    file = tmp_path / "needles.jsonl"
    text = embedded_text()
    script.write_problems(
        file, ByteTokenizer(), kinds=options.tasks, tokens=TOKENS, rows=3, text=text
    )
    run = script.fine_tuned(dataclasses.replace(config(), name="base"), options, file)
    assert run.training.steps == 3  # 98 of 100 of six problems, two a step
    batch = next(iter(open_dataset(run.data).loader("train", length=TOKENS, batch=5)))
    # Everything but BOS is a target.
    assert (batch["targets"][:, 0] != IGNORED).all()
    lines = [json.loads(line) for line in file.read_text().splitlines()[:5]]
    asked = (batch["targets"] != IGNORED).sum()
    assert asked == sum(len(line["prompt"] + line["answer"]) + 1 for line in lines)
    with pytest.raises(UserError, match="--kinds must be among .*, got niah_single"):
        script.Options(run=Path("base"), kinds=("niah_single",))


def test_problems_of_other_kinds_or_sizes_are_another_file(script):
    options = script.Options(run=Path("base"), rows=3)
    others = [
        dataclasses.replace(options, rows=4),
        dataclasses.replace(options, kinds=("niah_single_1",)),
        dataclasses.replace(options, run=Path("other")),
    ]
    files = {options.problems(tokens=64, text="a")} | {
        options.problems(tokens=65, text="a"),
        options.problems(tokens=64, text="b"),
        *(other.problems(tokens=64, text="a") for other in others),
    }
    assert len(files) == 6
    assert options.problems(tokens=64, text="a") in files


def test_a_trained_tokenizer_is_read_from_the_run(script, tmp_path):
    tiny = config()
    data = dataclasses.replace(tiny.data, tokenizer=Bpe(vocabulary=300))
    options = script.Options(run=tmp_path / "base", out=tmp_path)
    run = script.fine_tuned(dataclasses.replace(tiny, data=data), options, tmp_path)
    # Trained again, on the problems, it would give the words other numbers.
    assert run.data.tokenizer == TokenizerFile(path=str(tmp_path / "base/tokenizer"))
