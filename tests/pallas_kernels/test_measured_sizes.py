"""The file of block sizes: who reads it, for which calls, and what is wrong with it."""

import json
import os

import pytest

from pallas_kernels import measured_sizes
from pallas_kernels.measured_sizes import VARIABLE, find
from pallas_kernels.powers import next_power
from pallas_kernels.target import Target, as_if

SHAPE = {"batch": 8, "dtype": "float32", "training": True}
ENTRY = {
    "op": "an_op",
    "backend": "xla",
    "device": "cpu",
    "shape": SHAPE,
    "sizes": {"tile": 32},
    "ms": 1.5,
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Returns a function that writes the file which the variable names."""
    file = tmp_path / "tiles.json"
    monkeypatch.setenv(VARIABLE, str(file))

    def write(content) -> None:
        old = file.stat().st_mtime_ns if file.exists() else 0
        text = content if isinstance(content, str) else json.dumps(content)
        file.write_text(text)
        # A coarse clock must not make two writings one.
        os.utime(file, ns=(old + 1, old + 1))

    return write


def test_without_the_variable_nothing_is_read(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(measured_sizes, "_read", None)
    assert find("an_op", "xla", SHAPE) == {}


def test_sizes_are_for_their_op_backend_device_and_shape(written):
    written({"sizes": [ENTRY]})
    turned = dict(reversed(SHAPE.items()))
    assert find("an_op", "xla", turned) == {"tile": 32}
    assert find("another", "xla", SHAPE) == {}
    assert find("an_op", "triton", SHAPE) == {}
    assert find("an_op", "xla", SHAPE | {"batch": 16}) == {}
    with as_if(Target(platform="gpu", kind="a GPU")):
        assert find("an_op", "xla", SHAPE) == {}


def test_a_file_written_since_is_read_anew(written):
    written({"sizes": [ENTRY]})
    assert find("an_op", "xla", SHAPE) == {"tile": 32}
    written({"sizes": [ENTRY | {"sizes": {}}]})
    assert find("an_op", "xla", SHAPE) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", 'no JSON object with "sizes"'),
        ([], 'no JSON object with "sizes"'),
        ({"sizes": {}}, "is no list"),
        ({"sizes": [ENTRY | {"device": 3}]}, r'"sizes"\[0\] has no device'),
        ({"sizes": [ENTRY, 5]}, r'"sizes"\[1\] has no op'),
        ({"sizes": [ENTRY | {"sizes": {"tile": 0}}]}, "tile=0, wants 1 or more"),
        ({"sizes": [ENTRY | {"sizes": {"tile": True}}]}, "tile=True, wants 1"),
        ({"sizes": [ENTRY | {"shape": {"batch": [8]}}]}, "lists in shape"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(written, content, message):
    written(content)
    with pytest.raises(ValueError, match=f"{VARIABLE}: .*tiles.json.*{message}"):
        find("an_op", "xla", SHAPE)


def test_a_file_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone.json"))
    with pytest.raises(ValueError, match=r"RECURJAX_TILES: .*gone.json cannot be read"):
        find("an_op", "xla", SHAPE)


def test_batches_and_lengths_round_up_to_a_power_of_two():
    assert [next_power(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
