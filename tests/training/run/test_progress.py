import dataclasses
import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from recurjax.machine.devices import peak_flops
from recurjax.training.run import TrainingProgress
from recurjax.training.run import progress as module
from tests.training.tiny_experiment import config

CPU, H100 = (SimpleNamespace(device_kind=kind) for kind in ("cpu", "NVIDIA H100 80GB"))


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.seconds)
    return now


def show(clock, *, terminal, log=None, device=CPU, start=0):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    progress = TrainingProgress(console, config(), log=log, devices=[device] * 2)
    progress.start(start)
    for step in range(start + 1, start + 4):
        clock.seconds += 2.0
        progress.advance(step, 5.0 - step)
        progress.line(step, {"loss": 5.0 - step})
    progress.say("a word")
    progress.stop()
    return progress, text.getvalue()


def test_what_is_no_terminal_gets_plain_lines(clock):
    _, text = show(clock, terminal=False)
    assert text.splitlines() == [
        "step 1/12  loss 4.0000",
        "step 2/12  loss 3.0000  64 tokens/s  0:00:20 left",
        "step 3/12  loss 2.0000  64 tokens/s  0:00:18 left",
        "a word",
    ]


def test_a_long_line_is_not_wrapped(clock):
    """A log file's lines and what a terminal copies are one line each."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=False, width=20)
    progress = TrainingProgress(console, config(), log=None, devices=[CPU])
    progress.start(0)
    progress.say("words " * 9)
    progress.stop()
    assert text.getvalue() == "words " * 9 + "\n"


def test_a_terminal_gets_a_bar_with_loss_rate_and_time_left(clock):
    _, text = show(clock, terminal=True)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "step  3/12" in plain and "━" in plain
    assert "compiling the training step, 0 s" in plain
    assert "loss 2.0000  64 tokens/s  0:00:18 left" in plain
    assert "step 1/12  loss" not in plain and "a word" in plain


def test_the_log_gets_every_line_with_its_time(clock, tmp_path):
    for terminal in (True, False):
        log = tmp_path / f"log-{terminal}"
        show(clock, terminal=terminal, log=log)
        lines = log.read_text().splitlines()
        assert len(lines) == 4
        pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d step 3/12  loss 2.0000"
        assert re.match(pattern, lines[2])


def test_a_resumed_run_says_so_and_counts_only_its_own_steps(clock):
    _, text = show(clock, terminal=False, start=6)
    assert text.splitlines()[0] == "resuming at step 6 of 12"
    assert "step 9/12  loss -4.0000  64 tokens/s  0:00:06 left" in text


def test_mfu_is_the_models_flops_over_the_peak_of_all_devices(clock):
    progress, text = show(clock, terminal=False, device=H100)
    flops = config().model.flops_per_token(16)
    want = 64 * flops / (2 * 989e12)
    rates = progress.rates()
    assert rates == {"tokens_per_second": 64.0, "mfu": pytest.approx(want)}
    assert "MFU 0.0%" in text


def test_time_left_out_does_not_lower_the_rate(clock):
    progress, _ = show(clock, terminal=False)
    clock.seconds += 50.0
    progress.leave_out(50.0)
    assert progress.rates() == {"tokens_per_second": 64.0}


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_the_name_of_the_device(kind, peak):
    assert peak_flops(SimpleNamespace(device_kind=kind)) == peak


def test_flops_a_token_count_every_matrix_product_of_the_variant():
    model = config().model
    stack = model.stack
    # 2 layers: q, out 16 x 16; k, v 16 x 8; three matrices 16 x 32; 4 heads of 4.
    weights = 2 * (2 * 256 + 2 * 128 + 3 * 512)
    head = 16 * 257
    attention = 2 * 12 * 4 * 4 * 16
    assert model.flops_per_token(16) == 6 * (weights + head) + attention
    narrow = dataclasses.replace(stack, windows=(3, None))
    narrow = dataclasses.replace(model, stack=narrow)
    assert (
        narrow.flops_per_token(16) == 6 * (weights + head) + attention * (4 + 16) / 32
    )
