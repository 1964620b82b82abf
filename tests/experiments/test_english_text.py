"""Parts of texts in a drawn order: nothing is lost, and one seed is one text."""

import pytest

from experiments.english_text import main, parts_of
from recurjax.errors import UserError


def test_every_line_comes_once_and_parts_stay_whole(tmp_path, capsys):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    lines = [f"line {number} of a text\n" for number in range(60)]
    (tmp_path / "texts" / "a.txt").write_text("".join(lines[:40]))
    (tmp_path / "texts" / "deep" / "b.txt").write_text("".join(lines[40:]))
    results = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        out = tmp_path / name
        words = [str(out), str(tmp_path / "texts" / "**" / "*.txt"), "--part", "100"]
        assert main([*words, "--seed", str(seed)]) == 0
        results.append(out.read_text())
    assert results[0] == results[1] != results[2]
    assert sorted(results[0].splitlines(keepends=True)) == sorted(lines)
    assert all(part in results[0] for part in parts_of("".join(lines[:40]), 100))
    said = capsys.readouterr().out
    assert f"{tmp_path / 'one'}: {sum(map(len, lines)):,} bytes, 11 parts of 2" in said


def test_what_cannot_be_read_is_said(tmp_path):
    out = str(tmp_path / "out")
    with pytest.raises(UserError, match="no file matches 'nothing'"):
        main([out, "nothing"])
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(UserError, match="binary is not UTF-8"):
        main([out, str(tmp_path / "binary")])
    with pytest.raises(UserError, match="--part must be at least 1"):
        main([out, str(tmp_path / "binary"), "--part", "0"])
    assert not (tmp_path / "out").exists()
