"""A corpus and a tokenizer behind https://, read from a server on loopback."""

import shutil
import socket
import ssl
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import fsspec
import pytest

from recurjax.data.corpora import embedded_text, read_corpus
from recurjax.data.corpus_options import CorpusOptions
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.files.storage import copy_of, open_store

TEXT = embedded_text()[:5000]


class Quiet(SimpleHTTPRequestHandler):
    """Prints nothing; its server records the requests."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.asked.append(self.path)
        super().do_GET()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A web server with a certificate that it made itself; its URL and its folder."""
    pytest.importorskip("aiohttp", reason="aiohttp (extra cloud) is not installed")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes the server's certificate")
    root = tmp_path_factory.mktemp("web")
    result = tmp_path_factory.mktemp("certificate")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    files = ["-keyout", str(result / "key"), "-out", str(result / "certificate")]
    command = ["openssl", "req", *kind, *files, *names]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(result / "certificate", result / "key")
    served = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    served.asked = []
    served.socket = context.wrap_socket(served.socket, server_side=True)
    Thread(target=served.serve_forever, daemon=True).start()
    yield (
        served,
        f"https://127.0.0.1:{served.server_port}",
        root,
        result / "certificate",
    )
    served.shutdown()
    served.server_close()


@pytest.fixture
def web(server, tmp_path, monkeypatch):
    """The server, whose certificate clients trust, and an empty cache."""
    aiohttp = pytest.importorskip("aiohttp")
    served, url, root, certificate = server
    trusting = ssl.create_default_context(cafile=certificate)

    async def get_client(**options):
        options.pop("loop")  # the one that this runs in
        connector = aiohttp.TCPConnector(ssl=trusting)
        return aiohttp.ClientSession(connector=connector, **options)

    # As a user's own fsspec settings would; aiohttp reads SSL_CERT_FILE at its import.
    monkeypatch.setitem(fsspec.config.conf, "https", {"get_client": get_client})
    monkeypatch.setenv("RECURJAX_CACHE", str(tmp_path / "cache"))
    served.asked.clear()
    return url, root, served.asked


def test_a_text_is_read_once_and_again_when_it_has_changed(web):
    url, root, asked = web
    (root / "a.txt").write_text(TEXT)
    corpus = CorpusOptions(corpus=(f"{url}/a.txt",)).corpus_config()
    assert [d.text for d in read_corpus(corpus).documents] == [TEXT]
    first = asked.count("/a.txt")
    assert first > 0
    assert [d.text for d in read_corpus(corpus).documents] == [TEXT]
    assert asked.count("/a.txt") == first
    (root / "a.txt").write_text(TEXT[:-100])
    assert [d.text for d in read_corpus(corpus).documents] == [TEXT[:-100]]


def test_a_folder_s_files_are_read_by_their_names_and_nothing_is_written(web, tmp_path):
    url, root, _ = web
    ByteTokenizer().save(root / "tokenizer")
    for file in (root / "tokenizer").iterdir():
        got = copy_of(open_store(f"{url}/tokenizer"), file.name)
        assert got.read_bytes() == file.read_bytes()
    with pytest.raises(UserError, match="nothing can be written at https://"):
        open_store(url, write=True)


def test_what_is_not_there_is_one_sentence(web):
    url, _, _ = web
    with pytest.raises(UserError, match=f"no file matches '{url}/none.txt'"):
        list(
            read_corpus(
                CorpusOptions(corpus=(f"{url}/none.txt",)).corpus_config()
            ).documents
        )


@pytest.mark.parametrize("pattern", ["{}/a.txt", "{}/none.txt"])
def test_a_certificate_that_is_not_trusted_is_named(server, tmp_path, pattern):
    _, url, root, _ = server
    (root / "a.txt").write_text(TEXT)
    # As fsspec opens it without the settings of `web`.
    fsspec.filesystem("https").clear_instance_cache()
    with pytest.raises(UserError, match="certificate is not one that this") as raised:
        list(
            read_corpus(
                CorpusOptions(corpus=(pattern.format(url),)).corpus_config()
            ).documents
        )
    said = str(raised.value)
    assert said.count("\n") == 0 and url in said
    assert "self-signed certificate): name" in said and "$SSL_CERT_FILE" in said


def test_a_server_that_does_not_answer_is_not_a_missing_file(web):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"https://127.0.0.1:{free.getsockname()[1]}/a.txt"
    with pytest.raises(UserError, match=f"{nobody} cannot be used: .*[Cc]onnect"):
        list(read_corpus(CorpusOptions(corpus=(nobody,)).corpus_config()).documents)


def test_a_missing_aiohttp_names_the_extra(monkeypatch):
    def filesystem(*_, **__):
        raise ImportError("HTTPFileSystem requires aiohttp")

    monkeypatch.setattr(fsspec, "filesystem", filesystem)
    with pytest.raises(UserError, match=r"needs aiohttp: pip install 'recurjax\[cloud"):
        open_store("https://host/a.txt")
