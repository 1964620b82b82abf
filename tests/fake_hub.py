"""A Hugging Face Hub on loopback: what huggingface_hub asks of it, and its faults."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Repository:
    """Commits by their hash, branches by name; large files are LFS objects."""

    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: Files, branch: str = "main") -> str:
        content = json.dumps({n: hashlib.sha1(b).hexdigest() for n, b in files.items()})
        number = f"{len(self.commits)} {content}"
        name = hashlib.sha1(number.encode()).hexdigest()
        self.commits[name] = dict(files)
        self.branches[branch] = name
        return name

    def find(self, revision: str) -> str | None:
        revision = self.branches.get(revision, revision)
        return revision if revision in self.commits else None


@dataclass
class FakeHub:
    """The server's files, the requests to it, and its faults.

    Attributes:
      token: opens private and gated repositories, and lets a client write.
      cut: files that the connection breaks in, and after how many bytes.
      lfs: objects by their SHA-256. A test may replace an object's bytes.
      failing: a regular expression of "METHOD path" of requests that fail with 400.
      requests: "METHOD path" of all requests.
      store_has_token: a request for an object named a token.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_secret"
    cut: dict[str, int] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    failing: str | None = None
    store_has_token: bool = False
    requests: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def store(self) -> str:
        """Returns where large files are: another host, which gets no token."""
        return f"http://localhost:{self.port}/lfs"

    def add(self, name: str, folder: Path | Files, **facts) -> Repository:
        files = folder
        if isinstance(folder, Path):
            files = {
                file.relative_to(folder).as_posix(): file.read_bytes()
                for file in folder.rglob("*")
                if file.is_file()
            }
        repository = self.repositories[name] = Repository(**facts)
        repository.commit(files)
        for path, data in files.items():
            if is_large(path):
                self.lfs[sha256(data)] = data
        return repository

    def fetched(self) -> list[str]:
        """Returns the names of the files whose content was requested."""
        found = (
            re.match(r"GET /.*/resolve/[^/]+/(.*)|GET (/lfs/.*)", r)
            for r in self.requests
        )
        return [match[1] or match[2] for match in found if match]


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".gguf"))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Answers(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def answer(self):
        split = urlsplit(self.path)
        path = unquote(split.path)
        self.body = self._read_body()
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.failing and re.search(self.hub.failing, self.hub.requests[-1]):
            return self.error("Broken", 400)
        if path.startswith("/lfs/"):
            return self._object(path.removeprefix("/lfs/"))
        if path == "/api/validate-yaml":
            return self.send({"warnings": [], "errors": []})
        if path in ("/api/repos/create", "/api/repos/delete"):
            return self._create_or_delete(path)
        match = re.fullmatch(
            r"(?:/api/models)?/([\w.-]+/[\w.-]+?)(\.git)?(?:/(\w+)(?:/(.*))?)?", path
        )
        repository = self.hub.repositories.get(match[1]) if match else None
        if repository is None or (repository.private and not self.allowed):
            return self.error("RepoNotFound", 404 if self.allowed else 401)
        if repository.gated and not self.allowed:
            return self.error("GatedRepo", 403)
        what, rest = match[3] or "revision", match[4] or "main"
        return getattr(self, f"_{what}")(match[1], repository, rest)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    @property
    def allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _revision(self, name, repository, revision):
        commit = repository.find(revision)
        if commit is None:
            return self.error("RevisionNotFound", 404)
        siblings = [
            {"rfilename": path, "size": len(data), "blobId": blob_id(data)}
            | ({"lfs": self._pointer(data)} if is_large(path) else {})
            for path, data in repository.commits[commit].items()
        ]
        return self.send(
            {
                "id": name,
                "sha": commit,
                "siblings": siblings,
                "private": repository.private,
            }
        )

    def _tree(self, name, repository, rest):
        commit = repository.find(rest.partition("/")[0])
        if commit is None:
            return self.error("RevisionNotFound", 404)
        return self.send(
            [
                {"type": "file", "path": path, "oid": blob_id(d), "size": len(d)}
                | ({"lfs": self._pointer(d)} if is_large(path) else {})
                for path, d in repository.commits[commit].items()
            ]
        )

    @staticmethod
    def _pointer(data):
        # "oid" in a tree, "sha256" in a model's info, as on the Hub.
        names = dict.fromkeys(("oid", "sha256"), sha256(data))
        return {**names, "size": len(data), "pointerSize": 130}

    def _resolve(self, name, repository, rest):
        revision, _, path = rest.partition("/")
        commit = repository.find(revision)
        if commit is None:
            return self.error("RevisionNotFound", 404)
        data = repository.commits[commit].get(path)
        if data is None:
            return self.error("EntryNotFound", 404)
        headers = {"X-Repo-Commit": commit}
        if not is_large(path):
            headers["ETag"] = f'"{blob_id(data)}"'
            return self.send(data, headers, cut=self.hub.cut.get(path))
        headers |= {
            "Location": f"{self.hub.store}/{sha256(data)}",
            "X-Linked-Etag": f'"{sha256(data)}"',
            "X-Linked-Size": str(len(data)),
        }
        return self.send(b"", headers, code=302)

    def _object(self, digest):
        self.hub.store_has_token |= "Authorization" in self.headers
        if self.command == "PUT":
            self.hub.lfs[digest] = self.body
            return self.send({})
        return self.send(self.hub.lfs[digest], cut=self.hub.cut.get(digest))

    def _create_or_delete(self, path):
        if not self.allowed:
            return self.error("Unauthorized", 401)
        values = json.loads(self.body)
        name = f"{values['organization']}/{values['name']}"
        if path.endswith("delete"):
            del self.hub.repositories[name]
            return self.send({})
        if name in self.hub.repositories:
            return self.error("Exists", 409)
        made = Repository(
            private=values.get("visibility") == "private" or bool(values.get("private"))
        )
        made.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self.hub.repositories[name] = made
        return self.send({"url": f"{self.hub.url}/{name}", "name": name})

    def _branch(self, name, repository, branch):
        if self.command == "DELETE":
            del repository.branches[branch]
            return self.send({})
        if branch in repository.branches:
            return self.error("Exists", 409)
        repository.branches[branch] = repository.branches["main"]
        return self.send({})

    def _refs(self, name, repository, rest):
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in repository.branches.items()
        ]
        return self.send({"branches": branches, "converts": [], "tags": []})

    def _preupload(self, name, repository, revision):
        files = json.loads(self.body)["files"]
        modes = {
            file["path"]: "lfs" if is_large(file["path"]) else "regular"
            for file in files
        }
        return self.send(
            {
                "files": [
                    {"path": path, "uploadMode": mode, "shouldIgnore": False}
                    for path, mode in modes.items()
                ]
            }
        )

    def _info(self, name, repository, rest):
        objects = json.loads(self.body)["objects"]
        for each in objects:
            href = f"{self.hub.store}/{each['oid']}"
            each["actions"] = {"upload": {"href": href}}
        return self.send({"transfer": "basic", "objects": objects})

    def _commit(self, name, repository, branch):
        if not self.allowed:
            return self.error("Unauthorized", 401)
        files = dict(repository.commits[repository.branches[branch]])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(files, branch)
        return self.send(
            {
                "success": True,
                "commitOid": commit,
                "commitUrl": f"{self.hub.url}/{name}/commit/{commit}",
            }
        )

    def error(self, code, status):
        self.send({"error": code}, {"X-Error-Code": code}, code=status)

    def send(self, content, headers=None, *, code=200, cut=None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        part, span = data, self.headers.get("Range")
        if span and code == 200:
            first = int(span.removeprefix("bytes=").partition("-")[0])
            part, code = data[first:], 206
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if code == 206:
            self.send_header(
                "Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}"
            )
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut is not None:
            # Only once does something come: what resumes it gets nothing more.
            self.wfile.write(part[:cut] if code == 200 else b"")
            self.close_connection = True
            return
        self.wfile.write(part)

    def log_message(self, *_):
        """Says nothing."""


@contextmanager
def running_hub(monkeypatch, folder: Path):
    """Serves a Hub that huggingface_hub of this process uses; its cache is a folder."""
    from huggingface_hub import constants, file_download

    hub = FakeHub()
    handler = type("Answers", (_Answers,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    hub.port = server.server_port
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("RECURJAX_CACHE", str(folder / "recurjax-cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    # It waits a second before it resumes a download.
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
