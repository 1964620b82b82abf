"""Buckets, by fsspec's store in memory: the requests, and the messages."""

import logging
import sys

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from recurjax.errors import UserError
from recurjax.files import storage
from recurjax.files.storage import open_store, url_of


@pytest.fixture
def bucket():
    """A store in memory, empty before and after."""
    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket"
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("gs://bucket/runs", "gs://bucket/runs"),
        ("gs:/bucket/runs", "gs://bucket/runs"),  # as pathlib.Path writes it
        ("s3://b", "s3://b"),
        ("runs/gs", None),
        ("/runs", None),
        ("C:/runs", None),
        ("name:with/colon", None),
        ("name:", None),
    ],
)
def test_urls_are_told_from_paths(path, url):
    assert url_of(path) == url


def test_objects_are_written_listed_and_read(bucket, tmp_path):
    store = open_store(bucket + "/run", write=True)
    store.check_writable()
    assert store.sizes() == {}
    store.write("a/b", b"four")
    (tmp_path / "file").write_bytes(b"seven77")
    store.send(tmp_path / "file", "c")
    assert store.sizes() == {"a/b": 4, "c": 7} and store.read("a/b") == b"four"
    store.fetch("c", tmp_path / "new" / "copy")
    assert (tmp_path / "new" / "copy").read_bytes() == b"seven77"
    store.remove(["a/b"])
    assert store.sizes() == {"c": 7}
    with pytest.raises(UserError, match="no such bucket or object"):
        store.read("a/b")


OUTSIDE = ["../x", "a/../../x", "a/./x", "..", "a//x", "/etc/x", "a\\x", "a\0x"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_object_whose_name_leads_out_of_its_folder_is_refused(bucket, name):
    """A bucket's listing names the objects that are copied to this machine: a name with
    an empty, `.` or `..` part, a NUL, a backslash or a leading slash is refused.
    """
    store = open_store(f"{bucket}/run", write=True)
    fsspec.filesystem("memory").store[f"/bucket/run/{name}"] = MemoryFile(data=b"x")
    with pytest.raises(UserError, match="run has an object named .* rename or remove"):
        store.sizes()


def test_a_pattern_refuses_an_object_that_no_file_can_be_named(bucket):
    store = open_store(f"{bucket}/run", write=True)
    fsspec.filesystem("memory").store["/bucket/run/a\0x"] = MemoryFile(data=b"x")
    with pytest.raises(
        UserError, match=r"a.x00x' cannot be a file's name: rename or rem"
    ):
        store.glob(f"{bucket}/run/**")


def test_the_marker_of_an_empty_folder_is_no_object(bucket):
    fsspec.filesystem("memory").store["/bucket/run/empty/"] = MemoryFile(data=b"")
    fsspec.filesystem("memory").store["/bucket/run/..x/...y"] = MemoryFile(data=b"x")
    assert open_store(f"{bucket}/run").sizes() == {"..x/...y": 1}


def test_a_web_server_is_not_asked_for_a_folder():
    with pytest.raises(UserError, match="https://host/run: a web server lists no file"):
        open_store("https://host/run").sizes()


@pytest.mark.parametrize(
    ("url", "write", "said"),
    [
        ("ftp://host/x", False, "nothing can be read at ftp://, only at gs://, s3://"),
        ("https://host/x", True, "nothing can be written at https://, only at gs://"),
    ],
)
def test_a_scheme_that_cannot_is_told(url, write, said):
    with pytest.raises(UserError, match=said):
        open_store(url, write=write)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("gs://b", "gcsfs", "cloud"), ("s3://b", "s3fs", "s3")],
)
def test_a_missing_package_names_the_extra(url, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    said = rf"{package}: pip install 'recurjax\[{extra}\]'"
    with pytest.raises(UserError, match=said):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("gs://b", OSError("Anonymous caller, 401"), "GOOGLE_APPLICATION_CREDENTIALS"),
        ("s3://b", PermissionError("Access Denied"), "AWS_ACCESS_KEY_ID"),
        ("s3://b", OSError("no route\nto host"), "s3://b cannot be used: no route to"),
    ],
)
def test_what_a_store_answers_is_one_sentence(url, error, said, bucket, monkeypatch):
    store = open_store(bucket, write=True)
    object.__setattr__(store, "url", url)

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(type(store.system), "pipe_file", refuse)
    with pytest.raises(UserError, match=said) as caught:
        store.check_writable()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_who_set_no_credentials_is_told_which(scheme, bucket, monkeypatch, tmp_path):
    """Offline a store's package speaks of its network alone."""
    variables, _ = storage._CREDENTIALS_PLACES[scheme]
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_store(bucket, write=True)
    object.__setattr__(store, "url", f"{scheme}://b")

    def refuse(*_, **__):
        raise OSError("Cannot connect to host")

    monkeypatch.setattr(type(store.system), "pipe_file", refuse)
    with pytest.raises(UserError, match=f"to host; no credentials.*set {variables[0]}"):
        store.check_writable()
    monkeypatch.setenv(variables[0], "given")
    with pytest.raises(UserError, match="to host$"):
        store.check_writable()


def test_a_store_s_own_log_does_not_stand_beside_the_sentence(monkeypatch):
    """gcsfs prints sixty lines of traceback where a host has no network."""
    names = ("gcsfs", "google.auth")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(fsspec, "filesystem", lambda *_, **__: memory)
    try:
        open_store("gs://bucket/runs")
        assert not any(logger.isEnabledFor(logging.ERROR) for logger in loggers)
        loggers[0].setLevel(logging.DEBUG)
        open_store("gs://bucket/runs")
        assert loggers[0].isEnabledFor(logging.DEBUG)
    finally:
        for logger in loggers:
            logger.setLevel(logging.NOTSET)
