"""Files of arrays from strangers: read, or refused in one sentence."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.evaluation.exit_scores import HEAD_FILE, read_exit_head
from recurjax.files.arrays import Expected, read_array, read_arrays

GOOD = np.arange(6, dtype=np.int64).reshape(2, 3)
WHOLE = Expected("iu", (None, 3))


def npy(array) -> bytes:
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


def with_header(header: str, version: bytes = b"\x01\x00") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    size = len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + text


def claims(shape: str, dtype: str = "'<i8'") -> bytes:
    return with_header(
        f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}"
    )


BAD = {
    "empty": b"",
    "text": b"hello",
    "zeros": b"\0" * 200,
    "cut off": npy(GOOD)[:-1],
    "one byte more": npy(GOOD) + b"x",
    "no header": b"\x93NUMPY\x01\x00",
    "a later version": b"\x93NUMPY\x09\x00" + npy(GOOD)[8:],
    "a pickle": npy(np.array([{"a": 1}], dtype=object)),
    "text in it": npy(np.array(["a", "b"])),
    "fields": npy(np.zeros(2, dtype=[("a", "i4")])),
    "another dtype": npy(GOOD.astype(np.float32)),
    "another shape": npy(GOOD.T),
    "one axis": npy(GOOD[0]),
    "a size of 2^60": claims("(1152921504606846976, 3)"),
    "a negative size": claims("(-1, 3)"),
    "sizes that overflow": claims("(4294967296, 4294967296, 4294967296)"),
    "no shape": with_header("{'descr': '<i8', 'fortran_order': False}"),
    "a program": with_header("__import__('os').system('true')"),
    "deep": with_header("(" * 100),
    "a header of 4 GiB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
    "an unknown dtype": claims("(2, 3)", "'<q9'"),
    "a dtype of text": claims("(2, 3)", "'O'"),
    "nan": npy(np.full((2, 3), np.nan)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_array_is_one_sentence_and_takes_no_memory(name, tmp_path):
    """A tokenizer, a prepared directory, a run directory and an exit head are JSON and
    arrays, whose shapes and dtypes are checked; a header is not believed.
    """
    file = tmp_path / "a.npy"
    file.write_bytes(BAD[name])
    expected = Expected("f", (None, 3)) if name == "nan" else WHOLE
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="a.npy") as raised:
            read_array(file, expected, f"the array {file}")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    said = str(raised.value)
    assert "allow_pickle" not in said or name == "a header of 4 GiB"
    assert len(said) < 400 + len(str(file))


def test_a_good_array_is_read_in_either_order(tmp_path):
    for array in (GOOD, np.asfortranarray(GOOD), GOOD.astype(np.uint16), GOOD[:0]):
        read = read_array(npy(array), WHOLE, "it")
        np.testing.assert_array_equal(read, array)
        assert read.dtype == array.dtype


def head(tmp_path, **arrays):
    np.savez(tmp_path / HEAD_FILE, **arrays)
    return read_exit_head(tmp_path)


def test_an_exit_head_is_read_and_anything_else_refused(tmp_path):
    assert read_exit_head(tmp_path) is None
    w, b = np.ones((3, 4), np.float32), np.zeros(3, np.float32)
    found = head(tmp_path, weight=w, bias=b)
    assert found.weight.shape == (3, 4) and found.bias.shape == (3,)
    for arrays, said in [
        ({"weight": w}, "is not a .npz file of numbers"),
        ({"weight": w, "bias": b[:2]}, "weights of 3 loops and biases of 2"),
        ({"weight": w[0], "bias": b}, r"weight must hold float.* got float32\[4\]"),
        (
            {"weight": w, "bias": np.zeros(3, np.int32)},
            r"bias must hold .*, got int32\[3\]",
        ),
        ({"weight": w * np.nan, "bias": b}, "weight holds NaN or infinities"),
        ({"weight": np.array([{}]), "bias": b}, "is not a .npz file of numbers"),
    ]:
        with pytest.raises(UserError, match=said):
            head(tmp_path, **arrays)
    for data in (
        b"",
        b"PK\x03\x04",
        b"x" * 100,
        (tmp_path / HEAD_FILE).read_bytes()[:60],
    ):
        (tmp_path / HEAD_FILE).write_bytes(data)
        with pytest.raises(UserError, match="is not a .npz file of numbers"):
            read_exit_head(tmp_path)


def test_a_compressed_array_is_as_large_as_its_member_says(tmp_path):
    file = tmp_path / "a.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", claims("(1073741824, 3)") + b"\0" * 1000)
    with pytest.raises(UserError, match="its header describes"):
        read_arrays(file, {"a": WHOLE}, str(file))
