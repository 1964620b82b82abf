"""JSON from outside: every way to be wrong is one sentence."""

import pytest

from recurjax.errors import UserError
from recurjax.files.atomic import inside
from recurjax.files.json_files import parse_json, read_json, read_json_object


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the file is not valid JSON"),
        (b'{"a": 1', "the file is not valid JSON"),
        (b'"caf\xe9"', "the file is not UTF-8 text: byte 4 is 0xe9"),
        (b"\xff\xfe{}", "the file is not UTF-8 text: byte 0 is 0xff"),
        (nested(65), "nested too deep"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested too deep"),
        (nested(100_000), "nested too deep"),
        ("9" * 41, "an integer has 41 digits"),
        ("9" * 10_000, "an integer has 10000 digits"),
        (r'{"a": ["\ud800"]}', "an unpaired surrogate"),
        (r'{"\uDfff": 1}', "an unpaired surrogate"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(text, message):
    """JSON is refused when it is nested more than 64 deep, has an integer of more than
    40 digits or an unpaired surrogate, or is not UTF-8.
    """
    with pytest.raises(UserError, match=message) as caught:
        parse_json(text, "the file")
    assert len(str(caught.value)) < 200


def test_what_is_right_is_read():
    assert parse_json('{"a": [1, 2.5, null]}', "it") == {"a": [1, 2.5, None]}
    assert parse_json(nested(64), "it") is not None
    assert parse_json("9" * 39, "it") == 10**39 - 1
    assert parse_json(r'"\ud83d\ude00 \\ud800"', "it") == "\U0001f600 \\ud800"
    assert parse_json("7", "it") == 7


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    assert read_json(tmp_path / "list.json", "the list") == [1]
    with pytest.raises(UserError, match=r"the list .*list\.json must hold a JSON obj"):
        read_json_object(tmp_path / "list.json", "the list")
    with pytest.raises(UserError, match="the list .* cannot be read: Is a directory"):
        read_json(tmp_path, "the list")
    with pytest.raises(UserError, match="cannot be read: embedded null"):
        read_json(tmp_path / "a\0b", "the list")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "/etc/passwd", "a/b", "a\\b", "a\0b", "é" * 200, 3, None],
)
def test_names_stay_inside_their_folder(tmp_path, name):
    """The shards that `model.safetensors.index.json` and a prepared `manifest.json`
    name are plain names in their own folder; anything else is refused.
    """
    with pytest.raises(UserError, match="must be the plain name of a file"):
        inside(tmp_path, name, source=tmp_path / "index.json")


def test_a_plain_name_is_a_file_of_the_folder(tmp_path):
    """A link in that folder is followed."""
    assert inside(tmp_path, "a-1.bin", source=tmp_path) == tmp_path / "a-1.bin"
    (tmp_path / "b.json").symlink_to("/dev/null")
    assert inside(tmp_path, "b.json", source=tmp_path).read_bytes() == b""
