"""Corpora of the Hugging Face hub, from one that answers on loopback."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recurjax.data.config import Parquet
from recurjax.data.corpora import read_corpus
from recurjax.data.corpus_options import CorpusOptions, name_of
from recurjax.errors import UserError

REVISION = hashlib.sha1(b"revision").hexdigest()
TEXTS = ["one", "two", "three"]


class Hub(BaseHTTPRequestHandler):
    """Answers what huggingface_hub asks of the data set o/n; its files are a folder."""

    files: dict[str, bytes] = {}
    asked: list[str] = []

    def answer(self):
        path = unquote(urlsplit(self.path).path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        file = path.removeprefix("/datasets/o/n/resolve/").partition("/")[2]
        if path in ("/api/datasets/o/n", "/api/datasets/o/n/revision/main"):
            self.send({"id": "o/n", "sha": REVISION})
        elif path.startswith("/api/datasets/o/n/tree/"):
            below = path.removeprefix("/api/datasets/o/n/tree/").partition("/")[2]
            self.send(self.tree(below))
        elif path.startswith("/datasets/o/n/resolve/") and file in self.files:
            self.asked.append(f"{self.command} {file}")
            etag = hashlib.sha1(self.files[file]).hexdigest()
            kept = {"X-Repo-Commit": REVISION, "ETag": f'"{etag}"'}
            self.send(self.files[file], kept)
        else:
            self.send({}, {"X-Error-Code": "RepoNotFound"}, code=404)

    do_GET = do_HEAD = do_POST = answer

    def tree(self, below):
        result = {}
        for name, data in self.files.items():
            if name.startswith(below):
                oid = hashlib.sha1(data).hexdigest()
                result[name] = {"type": "file", "oid": oid, "size": len(data)}
                for folder in name.split("/")[:-1]:
                    result[folder] = {"type": "directory", "oid": REVISION, "size": 0}
        return [{"path": name, **what} for name, what in result.items()]

    def send(self, content, headers=None, *, code=200):
        whole = content if isinstance(content, bytes) else json.dumps(content).encode()
        part, span = whole, self.headers.get("Range")
        if span and code == 200:
            first, last = span.removeprefix("bytes=").split("-")
            part, code = whole[int(first) : int(last or len(whole)) + 1], 206
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if code == 206:
            end = f"{first}-{int(first) + len(part) - 1}"
            self.send_header("Content-Range", f"bytes {end}/{len(whole)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(part)

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import huggingface_hub.constants as constants

    for number, texts in enumerate((TEXTS[:2], TEXTS[2:])):
        file = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"text": texts}), file)
        Hub.files[f"data/{number}.parquet"] = file.read_bytes()
    Hub.files["README.markdown"] = b"no text of it"
    Hub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


def test_a_data_set_of_the_hub_is_read_and_kept(hub):
    for words in ("hf://datasets/o/n/**/*.parquet", "hf://datasets/o/n"):
        corpus = CorpusOptions(corpus=(words,)).corpus_config()
        assert corpus == Parquet(patterns=("hf://datasets/o/n/**/*.parquet",))
        assert name_of(corpus) == "n"
    assert [d.text for d in read_corpus(corpus).documents] == TEXTS
    fetched = Hub.asked.count("GET data/1.parquet")
    assert fetched
    reading = read_corpus(corpus)
    Hub.asked.clear()
    assert [d.text for d in reading.documents] == TEXTS
    # The second pass asks whether a file has changed and downloads none again.
    assert not [asked for asked in Hub.asked if asked.startswith("GET")]


def test_what_the_hub_does_not_show_is_one_sentence(hub):
    for pattern in ("hf://datasets/o/other/*.parquet", "hf://datasets/o/n/*.json"):
        with pytest.raises(UserError) as raised:
            list(
                read_corpus(
                    CorpusOptions(corpus=(pattern,), format="parquet").corpus_config()
                ).documents
            )
        assert pattern in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(UserError, match="HF_TOKEN"):
        CorpusOptions(corpus=("hf://datasets/o/other",)).corpus_config()
    hub.shutdown()
    hub.server_close()
    with pytest.raises(UserError, match="hf://datasets/o/n"):
        CorpusOptions(corpus=("hf://datasets/o/n@gone",)).corpus_config()
