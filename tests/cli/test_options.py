import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from recurjax import variants
from recurjax.cli.bench import BENCHES, Bench
from recurjax.cli.chat import ChatOptions
from recurjax.cli.compilers import CompilersOptions
from recurjax.cli.convert.command import (
    FromAuthors,
    FromHf,
    FromPeft,
    FromTorch,
    Merge,
    Quantize,
    ToPeft,
    ToTorch,
)
from recurjax.cli.convert.surgery import ToRecurFormer, ToRecursive, ToTransformer
from recurjax.cli.data import (
    MergeOptions,
    PrepareOptions,
    ShowOptions,
    VerifyOptions,
)
from recurjax.cli.evaluate.command import (
    EvaluateCore,
    EvaluateHarness,
    EvaluateRequests,
    Table,
)
from recurjax.cli.evaluate.task import EvaluateTask
from recurjax.cli.evaluate.text import EvaluateExits, EvaluateText
from recurjax.cli.generate import GenerateOptions
from recurjax.cli.inspect.report import ReportOptions
from recurjax.cli.options import (
    check_before_import,
    override,
    parse,
    run_script,
)
from recurjax.cli.plan import PlanOptions
from recurjax.cli.push.card import CardOptions
from recurjax.cli.push.command import PushOptions
from recurjax.cli.serve import ServeOptions
from recurjax.cli.train import _with_fitting_warmup
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.ranges import Fraction, PositiveInt, RangeChecks
from recurjax.run_table import load_experiment
from tests.cli.commands import recurjax
from tests.test_config_ranges import reachable
from tests.training.tiny_experiment import config
from tests.variants.rat.switches import WINDOW, rat, small


@pytest.mark.parametrize("kind", [GenerateOptions, ChatOptions, ServeOptions])
def test_options_are_known_from_the_source_of_their_class(kind):
    for field in dataclasses.fields(kind):
        option = "--" + field.name.replace("_", "-")
        nested = ".data" if dataclasses.is_dataclass(field.default) else ""
        check_before_import(kind.__module__, [f"{option}{nested}", "1"])
        check_before_import(kind.__module__, [f"--{field.name}{nested}=1"])
    check_before_import(kind.__module__, ["run", "--help"])
    with pytest.raises(UserError, match="no option --temprature: (did|see)"):
        check_before_import(kind.__module__, ["run", "--temprature", "0"])


def test_a_wrong_option_is_refused_before_jax_is_imported():
    lines = ["import sys", "from recurjax.cli.main import main"]
    for command in ("generate", "chat", "serve"):
        lines += [f"assert main(['{command}', 'runs/mine', '--max-tokens', '3']) == 2"]
    lines += ["sys.exit('jax' in sys.modules)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no option --max-tokens: did you mean --max-new-tokens?" in done.stderr


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """Options with paths."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    json: Path | None = None
    prompt: str = ""


@pytest.fixture
def experiment():
    return dataclasses.replace(config(), model=small(rat(), WINDOW))


def test_a_field_of_a_config_in_a_tuple_is_an_option(experiment):
    words = ["--model.stack.pattern.0.chunk", "8", "--model.stack.pattern.1.window=5"]
    changed = override(experiment, words, prog="train")
    mixer, window = changed.model.stack.pattern
    assert mixer == rat(chunk=8)
    assert window == dataclasses.replace(WINDOW, window=5)
    assert dataclasses.replace(changed, model=experiment.model) == experiment


def test_a_field_that_the_entry_lacks_is_told(experiment):
    message = (
        r"no option --model.stack.pattern.1.chunk: did you mean --model.stack.pattern"
    )
    with pytest.raises(UserError, match=message):
        override(experiment, ["--model.stack.pattern.1.chunk", "8"], prog="train")


def test_a_path_may_begin_with_the_home(monkeypatch, tmp_path):
    """Bash leaves --json=~/x to the program; a text and a URL stay as they are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["~/run", "gs://b/x", "--json=~/x.json", "--prompt", "~/x"]
    result = parse(Paths, words, prog="read")
    assert result.runs == (tmp_path / "run", Path("gs:/b/x"))
    assert (result.json, result.prompt) == (tmp_path / "x.json", "~/x")


@pytest.mark.parametrize(
    "kind",
    [
        *(Bench, ChatOptions, GenerateOptions, PlanOptions, ServeOptions),
        *(CardOptions, PushOptions, CompilersOptions, ReportOptions),
        *(PrepareOptions, MergeOptions, ShowOptions, VerifyOptions),
        *(EvaluateText, EvaluateExits, EvaluateTask, Table),
        *(EvaluateCore, EvaluateHarness, EvaluateRequests),
        *(FromHf, FromTorch, FromAuthors, FromPeft, ToTorch, ToPeft, Merge, Quantize),
        *(ToRecurFormer, ToRecursive, ToTransformer),
        *reachable(Experiment),
    ],
    ids=lambda kind: kind.__name__,
)
def test_help_says_something_of_every_option(kind):
    """tyro reads one name per line: a line for two fields helps with neither."""
    texts = "\n".join(parent.__doc__ or "" for parent in kind.__mro__)
    said = re.findall(r"^ {6}(\w+): ", texts, re.MULTILINE)
    assert [f.name for f in dataclasses.fields(kind) if f.name not in said] == []


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inner(RangeChecks):
    """Of a command.

    Attributes:
      share: of what there is.
    """

    share: Fraction | None = None
    plain: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ranges(RangeChecks):
    """A command.

    Attributes:
      largest_size: of a thing.
      inner: the rest.
    """

    largest_size: PositiveInt
    inner: Inner = Inner()


def test_help_shows_the_range_of_a_field(capsys):
    with pytest.raises(SystemExit):
        parse(Ranges, ["--help"], prog="ranges")
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "--largest-size INT of a thing. (>= 1) (required)" in text
    assert "of what there is. (>= 0 and <= 1) (default: None)" in text
    assert "--inner.plain FLOAT (default: 0.0)" in text


@pytest.mark.parametrize(
    "words, message",
    [
        ("--largest-size 0", "^--largest-size: must be >= 1, got 0$"),
        (
            "--largest-size 1 --inner.share 2",
            "^--inner.share: must be >= 0 and <= 1, got 2.0$",
        ),
        ("--largest-size 1 --inner.plain nan", "^--inner.plain: must be finite"),
    ],
)
def test_a_value_out_of_range_is_named_by_its_option(words, message):
    with pytest.raises(UserError, match=message):
        parse(Ranges, words.split(), prog="ranges")


def test_help_names_every_bench():
    folder = Path(variants.__path__[0])
    others = [name for name in BENCHES if not (folder / name).is_dir()]
    assert [name for name in others if f"`{name}`" not in Bench.__doc__] == []


def test_fewer_steps_shorten_the_warm_up_in_proportion(capsys):
    quickstart = load_experiment("quickstart")  # 450 steps, of which 40 warm up

    def warmup(*options):
        words = list(options)
        changed = override(quickstart, words, prog="recurjax train quickstart")
        fitting = _with_fitting_warmup(changed, quickstart, words)
        return fitting.schedule.warmup_steps

    assert warmup("--training.steps", "45") == 4
    line = "45 steps instead of 450: the warm-up takes 4 instead of 40"
    assert line in capsys.readouterr().out
    assert warmup("--training.steps=10") == 1
    assert warmup("--training.steps", "900") == warmup() == 40
    given = ("--training.steps", "45", "--schedule.warmup_steps", "40")
    assert warmup(*given) == 40


def test_help_begins_with_the_options_used_most():
    code, out, _ = recurjax("train", "quickstart", "--help")
    head = " ".join(out.partition("usage:")[0].split())
    assert code == 0
    assert "--training.steps 450 " in head and "--optimizer.learning-rate 0.01 " in head
    assert "--corpus FILES" in head and "--training.spikes" not in head


def test_a_script_ends_with_its_code_or_a_sentence_behind_its_name(monkeypatch):
    monkeypatch.setattr("sys.argv", ["experiments/rat/cost.py"])

    def refuse():
        raise UserError("no such text")

    with pytest.raises(SystemExit) as ended:
        run_script(refuse)
    assert ended.value.code == "cost.py: no such text"
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: 130)
    assert ended.value.code == 130
