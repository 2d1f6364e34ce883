"""A Hub over real sockets, as Hugging Face's answers: revisions, a tree by pages, and redirects to a store elsewhere.

GET  /api/datasets/ORG/NAME/revision/REV      {"id", "sha"}
GET  /api/datasets/ORG/NAME/tree/COMMIT/PATH  [{"type", "path", "size", "oid", "lfs"}], Link: <…cursor=…>; rel="next"
HEAD /datasets/ORG/NAME/resolve/COMMIT/PATH   302 to the store, signed, X-Linked-Etag; a small file: 200 and its ETag
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

SMALL = 200  # greatest size in bytes of a file in git and not in the store
PAGE = 3  # entries per page of a tree
Refusal = tuple[int, dict[str, str]]


class ToyHub(ThreadingHTTPServer):
    """A Hub with the dataset org/name, whose commits are folders below `root`, and a store on another port."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Hub)
        self.root, self.lock = root, threading.Lock()
        self.branches: dict[str, str] = {}
        self.asked: list[str] = []  # requests to the Hub: method and path
        self.tokens: list[str | None] = []  # tokens of these requests
        self.stored: list[tuple[str, int]] = []  # answers of the store: name of the content, and bytes
        self.at_store: list[dict[str, str]] = []  # headers of the requests to the store
        self.refuse: Callable[[str, int], Refusal | None] = lambda path, number: None
        self.signatures = itertools.count(1)
        self.expired: set[int] = set()  # signatures that the store rejects
        self.store = ThreadingHTTPServer(("127.0.0.1", 0), _Store)
        self.store.daemon_threads = True
        self.store.hub = self  # type: ignore[attr-defined]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, folder: Path, branch: str = "main") -> str:
        """Create a commit of a branch, with the current files of a folder."""
        commit = hashlib.sha1(f"{branch} {len(self.branches)} {self.branches.get(branch)}".encode()).hexdigest()
        shutil.copytree(folder, self.root / commit)
        self.branches[branch] = commit
        return commit

    def times(self, part: str) -> int:
        """Count the requests to the Hub whose path contains `part`."""
        return sum(part in path for path in self.asked)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


def content_of(path: Path) -> tuple[str, bool]:
    """Return the hash of a file, and whether it is in the store."""
    data = path.read_bytes()
    if len(data) > SMALL:
        return hashlib.sha256(data).hexdigest(), True
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16

    def log_message(self, format: str, *args: object) -> None:
        pass

    def send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def send_range(self, data: bytes, etag: str, begin: int, end: int) -> None:
        headers = {"ETag": f'"{etag}"', "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        self.send(206, data[begin:end], headers)

    def wanted(self, size: int) -> tuple[int, int]:
        first, last = self.headers.get("Range", f"bytes=0-{size - 1}").removeprefix("bytes=").split("-")
        return int(first), min(int(last) + 1, size)


class _Hub(_Handler):
    server: ToyHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, parts = self.server, urlsplit(self.path)
        path = unquote(parts.path)
        with hub.lock:
            hub.asked.append(f"{self.command} {path}")
            hub.tokens.append(self.headers.get("Authorization"))
            refusal = hub.refuse(path, len(hub.asked))
        if refusal is not None:
            self.send(refusal[0], b"{}", refusal[1])
        elif not path.removeprefix("/api").startswith("/datasets/org/name/"):
            self.send(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."})
        else:
            kind, _, rest = path.partition("/org/name/")[2].partition("/")
            revision = next((each for each in (*hub.branches, *hub.branches.values()) if _leads(rest, each)), None)
            if revision is None:
                self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            commit, name = hub.branches.get(revision, revision), rest[len(revision) + 1 :]
            getattr(self, kind)(commit, name, parse_qs(parts.query))

    def revision(self, commit: str, name: str, query: dict[str, list[str]]) -> None:
        self.send(200, json.dumps({"id": "org/name", "sha": commit, "tags": [], "siblings": []}).encode())

    def tree(self, commit: str, name: str, query: dict[str, list[str]]) -> None:
        root = self.server.root / commit
        if not (root / name).is_dir():
            self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        found = [_entry(root, each) for each in sorted((root / name).rglob("*"))]
        first = int(query.get("cursor", ["0"])[0])
        headers = {}
        if first + PAGE < len(found):
            url = f"{self.server.url}{urlsplit(self.path).path}?recursive=True&limit={PAGE}&cursor={first + PAGE}"
            headers["Link"] = f'<{url}>; rel="next"'
        self.send(200, json.dumps(found[first : first + PAGE]).encode(), headers)

    def resolve(self, commit: str, name: str, query: dict[str, list[str]]) -> None:
        path = self.server.root / commit / name
        if not path.is_file():
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content, is_stored = content_of(path)
        size, headers = path.stat().st_size, {"X-Repo-Commit": commit}
        if is_stored:
            port, signature = self.server.store.server_port, next(self.server.signatures)
            headers["Location"] = f"http://127.0.0.1:{port}/{commit}/{name}?signature={signature}&to=a%2Fb"
            headers |= {"X-Linked-Etag": f'"{content}"', "X-Linked-Size": str(size)}
            self.send(302, b"", headers)
        elif self.command == "HEAD":
            self.send(200, b"", {**headers, "ETag": f'"{content}"', "Content-Length": str(size)})
        else:
            self.send_range(path.read_bytes(), content, *self.wanted(size))


class _Store(_Handler):
    def do_GET(self) -> None:
        hub: ToyHub = self.server.hub  # type: ignore[attr-defined]
        parts = urlsplit(self.path)
        signed = parse_qs(parts.query)
        with hub.lock:
            hub.at_store.append({name.lower(): value for name, value in self.headers.items()})
        if signed.get("to") != ["a/b"] or int(signed["signature"][0]) in hub.expired:
            self.send(403)
            return
        path = hub.root / unquote(parts.path).lstrip("/")
        data = path.read_bytes()
        begin, end = self.wanted(len(data))
        with hub.lock:
            hub.stored.append((path.name, end - begin))
        self.send_range(data, "another-etag", begin, end)


def _leads(path: str, revision: str) -> bool:
    return path == revision or path.startswith(f"{revision}/")


def _entry(root: Path, path: Path) -> dict[str, object]:
    name = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "size": 0, "oid": "d" * 40}
    content, is_stored = content_of(path)
    entry: dict[str, object] = {"type": "file", "path": name, "size": path.stat().st_size}
    if not is_stored:
        return {**entry, "oid": content}
    return {**entry, "oid": "f" * 40, "lfs": {"oid": content, "size": path.stat().st_size, "pointerSize": 134}}


@contextlib.contextmanager
def local_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyHub]:
    """Yield a Hub for `hf://`, with its own cache, in a folder."""
    (folder / "commits").mkdir()
    hub = ToyHub(folder / "commits")
    for name in ("HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_toy", "HF_HOME": str(folder / "home")}
    cache = {"SAVABLE_CACHE": str(folder / "cache"), "SAVABLE_CACHE_BYTES": str(10**8), "SAVABLE_RETRY_S": "10"}
    for name, value in (settings | cache).items():
        monkeypatch.setenv(name, value)
    servers = (hub, hub.store)
    threads = [
        threading.Thread(target=each.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True) for each in servers
    ]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for each in servers:
            each.shutdown()
            each.server_close()
