import pytest

from recurjax.errors import UserError
from tests.trials import kill_and_prepare


@pytest.mark.sweep
def test_data_killed_while_it_is_prepared_ends_with_the_same_bytes(capsys):
    assert kill_and_prepare.main(["--kills", "2", "--megabytes", "0.6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("unbroken: ") and len(lines) == 4
    assert all(line.endswith("; byte-identical") for line in lines[1:3])
    assert lines[3] == "2 of 2 ended byte-identical"


def test_a_changed_byte_and_a_missing_file_are_seen(tmp_path):
    options = kill_and_prepare.Options(megabytes=0.5)
    kill_and_prepare.write_corpus(tmp_path / "one", options)
    whole = kill_and_prepare.contents(tmp_path)
    data = (tmp_path / "one").read_bytes()
    (tmp_path / "one").write_bytes(data[:-2] + b"?\n")
    assert kill_and_prepare.contents(tmp_path) != whole
    kill_and_prepare.write_corpus(tmp_path / "one", options)
    assert kill_and_prepare.contents(tmp_path) == whole
    with pytest.raises(UserError, match="--kills and --workers"):
        kill_and_prepare.Options(kills=0)
