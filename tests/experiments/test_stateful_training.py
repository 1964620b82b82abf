"""The set of stateful training: a variant trains, is read on, and is found again."""

from typing import get_args

import pytest

from experiments import stateful_training
from recurjax.errors import UserError
from recurjax.model import count_parameters


def test_both_sides_of_a_variant_differ_by_what_they_carry():
    options = stateful_training.Options()
    for name in get_args(stateful_training.Name):
        alone = stateful_training.experiment(name, options, carry=1)
        carried = stateful_training.experiment(name, options, carry=8)
        assert alone.model == carried.model and alone.objective == carried.objective
        assert alone.training.tokens_per_step == carried.training.tokens_per_step
        assert carried.training.row_length == 512
        assert count_parameters(alone.model).total < 700_000


@pytest.mark.sweep
def test_a_small_set_trains_reads_on_and_resumes(quick_compilation, tmp_path, capsys):
    words = ["--runs", str(tmp_path), "--variants", "rnn", "--seeds", "1"]
    words += ["--steps", "2"]
    assert stateful_training.main(words) == 0
    table = (tmp_path / "results.md").read_text()
    assert capsys.readouterr().out.endswith(table)
    head, _, *rows = table.splitlines()
    columns = "0 to 63 | 64 to 127 | 128 to 255 | 256 to 511"
    assert head == f"| bits per byte at positions | {columns} |"
    assert [row.split()[1] for row in rows] == ["rnn", "rnn_carry8"]
    trained = (tmp_path / "rnn" / "metrics.jsonl").read_bytes()
    # A finished side is read, not trained.
    assert stateful_training.main(words) == 0
    assert (tmp_path / "rnn" / "metrics.jsonl").read_bytes() == trained
    assert (tmp_path / "results.md").read_text() == table
    with pytest.raises(UserError, match="steps"):
        stateful_training.main([*words[:-1], "3"])
