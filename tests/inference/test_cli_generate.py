import json
from types import SimpleNamespace

import pytest

from recurjax.cli import generate as command
from recurjax.cli.generate import run
from recurjax.data.tokenizers import ByteTokenizer, TextSettings
from recurjax.errors import UserError

LETTERS = "abcdefghijklmnopqrstuvwxyz\n"
SHORT = ["--temperature", "0", "--max-new-tokens", "6"]


@pytest.fixture(autouse=True)
def loads(cycle, monkeypatch):
    """Replaces the run directory; records the requests to it."""
    calls = []

    def load_run(path, *, step=None, mesh=None, weights="stored", report=print):
        calls.append((str(path), step))
        return SimpleNamespace(model=cycle(LETTERS), tokenizer=ByteTokenizer(), step=7)

    monkeypatch.setattr(command, "load_run", load_run)
    return calls


def test_one_prompt_is_shown_with_its_text_and_the_speed_apart(capsys, loads):
    assert run(["runs/x", "--prompt", "ab", *SHORT]) == 0
    out, err = capsys.readouterr()
    assert out == "abcdefgh\n"
    assert "prefill: 3 tokens at" in err and "decode: 5 tokens at" in err
    assert loads == [("runs/x", None)]
    assert run(["runs/x", "--prompt", "ab", *SHORT, "--no-stream", "--step", "7"]) == 0
    assert capsys.readouterr().out == out
    assert loads[1] == ("runs/x", 7)


def test_sampling_that_is_not_given_is_the_models_own(capsys, cycle, monkeypatch):
    tokenizer = ByteTokenizer()
    tokenizer.settings = TextSettings(generation={"do_sample": False, "top_p": 0.9})
    loaded = SimpleNamespace(model=cycle(LETTERS), tokenizer=tokenizer, step=7)
    monkeypatch.setattr(command, "load_run", lambda *_, **__: loaded)
    words = ["runs/x", "--prompt", "ab", "--max-new-tokens", "6", "--top-p", "0.5"]
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert out == "abcdefgh\n"
    assert "sampling of the model's own: temperature 0.0\n" in err


def test_several_prompts_are_shown_in_blocks(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("k\n\nst\n")
    options = ["--prompt", "ab", "--prompts-file", str(file), "--stop", "\\n"]
    assert run(["runs/x", *options, *SHORT]) == 0
    assert capsys.readouterr().out == (
        "--- prompt 1 of 3, ended by length ---\nabcdefgh\n"
        "--- prompt 2 of 3, ended by length ---\nklmnopq\n"
        "--- prompt 3 of 3, ended by length ---\nstuvwxyz\n"
    )


def test_json_lines_and_json_output(capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"w"\n"xy\\na"\n"m"\n')
    options = ["--prompts-file", str(file), "--stop", "\\n", "--stop", "f", "--json"]
    assert run(["runs/x", *options, *SHORT]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 7
    rows = result["generations"]
    assert [row["prompt"] for row in rows] == ["w", "xy\na", "m"]
    assert [row["text"] for row in rows] == ["xyz", "bcde", "nopqrs"]
    assert [row["finish_reason"] for row in rows] == ["stop", "stop", "length"]
    assert bytes(rows[0]["tokens"]) == b"xyz\n"
    assert result["timing"]["decode_tokens_per_second"] > 0


def test_only_line_ends_part_prompts(capsys, tmp_path):
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    prompts = ["def f():\x0c pass", "a\u2028b"]
    text.write_bytes(("\ufeff" + "\r\n".join(prompts)).encode())
    rows = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts]
    lines.write_text("\n".join(rows), encoding="utf-8")
    for file in (text, lines):
        assert run(["r", "--prompts-file", str(file), *SHORT, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["generations"]
        assert [row["prompt"] for row in rows] == prompts


LINES = ["--max-new-tokens", "9", "--temperature", "0.7", "--seed", "3"]


def read_lines(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_texts_of_a_file_go_on_where_a_killed_run_stopped(capsys, tmp_path):
    prompts, whole = tmp_path / "prompts.txt", tmp_path / "whole.jsonl"
    prompts.write_text("ab\nk\nst\nfghijk\nx\n")
    options = ["--prompts-file", str(prompts), "--slots", "2", *LINES]
    assert run(["r", *options, "--json-lines", str(whole)]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "5 texts in" in err and "decode: 40 tokens at" in err
    rows = read_lines(whole)
    assert sorted(row["number"] for row in rows) == [0, 1, 2, 3, 4]
    assert {row["prompt"] for row in rows} == {"ab", "k", "st", "fghijk", "x"}
    # Cut in the midst of the third line.
    data = whole.read_bytes().splitlines(keepends=True)
    part = tmp_path / "part.jsonl"
    part.write_bytes(b"".join(data[:2]) + data[2][:20])
    assert run(["r", *options, "--json-lines", str(part)]) == 0
    assert "2 of 5 texts were there already" in capsys.readouterr().err
    again = read_lines(part)
    assert sorted(again, key=lambda row: row["number"]) == sorted(
        rows, key=lambda row: row["number"]
    )
    # Nothing is left to do: nothing is done.
    assert run(["r", *options, "--json-lines", str(part)]) == 0
    assert "5 of 5 texts" in capsys.readouterr().err
    assert read_lines(part) == again


def test_a_file_of_other_texts_is_not_added_to(tmp_path):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("ab\n")
    options = ["--prompts-file", str(prompts), *LINES, "--json-lines", str(out)]
    assert run(["r", *options]) == 0
    before = out.read_bytes()
    with pytest.raises(UserError, match="other settings or another checkpoint"):
        run(["r", *options, "--seed", "4"])
    with pytest.raises(UserError, match="continues another prompt than number 1: name"):
        run(["r", *options, "--prompt", "q"])
    assert out.read_bytes() == before
    out.write_text('{"number": 0}\n')
    with pytest.raises(UserError, match="is not from an earlier call"):
        run(["r", *options])
    with pytest.raises(UserError, match="cannot write to"):
        run(["r", *options[:-1], str(tmp_path)])


def test_every_sampling_option_has_a_flag(capsys):
    sampling = "--temperature 0.7 --top-k 3 --top-p 0.9 --min-p 0.01"
    options = [*sampling.split(), "--repetition-penalty", "1.0", "--seed", "4"]
    texts = []
    for seed in ("4", "4"):
        options[-1] = seed
        assert run(["r", "--prompt", "ab", "--max-new-tokens", "6", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --prompt TEXT or --prompts-file"),
        (["--prompts-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompt", "a", "--top-p", "2"], "^--top-p: must be > 0 and <= 1, got 2.0"),
        (
            ["--prompt", "a", "--max-new-tokens", "0"],
            "^--max-new-tokens: must be >= 1, got 0",
        ),
        (
            ["--prompt", "a", "--seed", "-1"],
            r"^--seed: must be >= 0 and < 2\^32, got -1",
        ),
        (["--prompt", "a", "--temprature", "1"], "did you mean --temperature"),
        (["--prompt", "a", "--top-k", "few"], "--top-k"),
    ],
)
def test_mistakes_are_told_in_a_sentence(options, message):
    with pytest.raises(UserError, match=message):
        run(["runs/x", *options])


def test_two_places_for_the_same_texts_are_refused(tmp_path):
    options = ["--prompt", "a", "--json", "--json-lines", str(tmp_path / "out.jsonl")]
    with pytest.raises(UserError, match="leave out --json"):
        run(["r", *options])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n \n", "has no prompt"),
        ("a.jsonl", '"a"\n\n{"b"\n', "line 3 of .* is not valid JSON"),
        ("a.jsonl", '"a"\n{"prompt": "a"}\n', "line 2: must be a JSON string"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path, name, text, message):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        run(["runs/x", "--prompts-file", str(file)])
    assert str(file) in str(caught.value)
