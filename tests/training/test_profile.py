import io
import re

import pytest
from rich.console import Console

from recurjax.training.loop import train
from tests.training.tiny_experiment import changed, config


@pytest.mark.parametrize("last", [3, pytest.param(99, marks=pytest.mark.slow)])
def test_a_profiler_trace_of_the_asked_steps_is_left(quick_compilation, tmp_path, last):
    steps = {"steps": 4, "profile": (2, last)}
    experiment = changed(config(), training=steps, evaluation={"every": 0})
    text = io.StringIO()
    train(experiment, tmp_path, console=Console(file=text, width=400))
    [trace] = (tmp_path / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 0
    said = text.getvalue().splitlines()
    message = said[: said.index(f"profiler trace: {tmp_path}/profile")]
    steps = [line for line in message if re.match(r"step \d/4", line)]
    assert steps[-1].startswith(f"step {min(last, 4)}/4")
