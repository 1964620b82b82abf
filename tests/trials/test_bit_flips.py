"""Flips of bits in a checkpoint, a few of them, in two pieces."""

import json
import random

import pytest

from tests.training.compilation import quick_compilation
from tests.trials.bit_flips import Options, draw, main

__all__ = ["quick_compilation"]


def test_small_files_are_drawn_as_well_as_large_ones(tmp_path):
    files = [tmp_path / name for name in ("large", "small", "empty")]
    for file, size in zip(files, (10_000, 3, 0), strict=True):
        file.write_bytes(bytes(size))
    drawn = [draw(random.Random(n), files) for n in range(200)]
    assert {file.name for file, _ in drawn} == {"large", "small"}
    assert all(bit < 8 * file.stat().st_size for file, bit in drawn)
    assert 30 < sum(file.name == "small" for file, _ in drawn) < 80


@pytest.mark.slow
def test_no_flip_is_silent_and_a_stopped_night_goes_on(
    quick_compilation, tmp_path, capsys
):
    into = tmp_path / "flips.json"
    assert main(Options(flips=12, into=into, most=5)) == 0
    assert capsys.readouterr().out.startswith("5 of 12 flips: ")
    assert main(Options(flips=12, into=into)) == 0
    assert capsys.readouterr().out.startswith("12 of 12 flips: ")
    kinds = list(json.loads(into.read_text()).values())
    assert len(kinds) == 12 and set(kinds) == {"found", "harmless"}
