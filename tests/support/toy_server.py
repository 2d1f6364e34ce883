"""A web server with S3's listing that counts what it sends, and fails on demand."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.util import get_temp_dir
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from savable_pipeline.data.remote.session import close_scratch

Fault = Callable[[str, int], str | None]  # from a path and the number of the request to the name of a fault
SLOW_S = 1.0

PAGE = 1000  # objects per answer about a bucket, as in S3
_TURN = 1 << 14  # bytes that an answer may send on a limited link before another one does
STALL_BYTES = 600_000  # bytes sent before a stalled answer stalls
STALL_S = 2.5


class ToyServer(ThreadingHTTPServer):
    """A server of the files below `folder`, with GET with ranges and HEAD. The first part of a path is also a
    bucket.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder = folder
        self.fault: Fault = lambda path, number: None
        self.ranges: list[tuple[str, int, int]] = []  # path, start and stop of every complete answer
        self.requests = 0
        self.redirect = ""  # the address to which every request is redirected
        self.headers: list[dict[str, str]] = []  # headers of the requests
        self.link_bytes_per_s = 0.0  # limit of all answers together; 0: none
        self.link_bytes = 0  # bytes that the limited link has carried
        self._link_free_at = 0.0
        self.changes = True  # whether objects change; if not, a bucket is listed once
        # by bucket and prefix, at the last listing from the start
        self._listed: dict[tuple[str, str], list[tuple[str, int, str]]] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def sent(self, suffix: str = ".tar") -> int:
        """Return the number of sent bytes of files with this ending."""
        return sum(stop - start for path, start, stop in self.ranges if path.endswith(suffix))

    def page(self, bucket: str, prefix: str, first: int) -> tuple[list[tuple[str, int, str]], bool]:
        """Return names, sizes and ETags of the objects from number `first` on, and whether more follow."""
        rows = self._listed.get((bucket, prefix))
        if rows is None or (self.changes and not first):
            root = self.folder / bucket
            found = [file for file in sorted(root.rglob("*")) if file.is_file()]
            keys = [(file.relative_to(root).as_posix(), file.stat()) for file in found]
            rows = [(key, stat.st_size, _tag(stat)) for key, stat in keys if key.startswith(prefix)]
            self._listed[bucket, prefix] = rows
        return rows[first : first + PAGE], first + PAGE < len(rows)

    def wait_for_link(self, size: int) -> None:
        """Wait until the link, which all answers share in small turns, has carried `size` more bytes."""
        with self.lock:
            self._link_free_at = max(time.monotonic(), self._link_free_at) + size / self.link_bytes_per_s
            self.link_bytes += size
            free_at = self._link_free_at
        time.sleep(max(0.0, free_at - time.monotonic()))

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


def _tag(stat: os.stat_result) -> str:
    return f'"{stat.st_mtime_ns:x}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body together, because two small packets would delay each other by 40 ms
    server: ToyServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        parts = urlsplit(self.path)
        with self.server.lock:
            self.server.requests += 1
            number = self.server.requests
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.server.redirect:
            self._send(307, b"", {"Location": self.server.redirect + self.path})
            return
        fault = self.server.fault(parts.path, number)
        if fault == "slow":
            time.sleep(SLOW_S)
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        elif fault is not None and fault.isdecimal():
            self._send(int(fault), b"no", {})
            return
        if "list-type" in parse_qs(parts.query):
            self._send(200, self._listing(parts.path, parse_qs(parts.query)), {"Content-Type": "application/xml"})
            return
        path = self.server.folder / unquote(parts.path).lstrip("/")
        if not path.is_file():
            self._send(404, b"nothing here", {})
            return
        self._send_file(path, parts.path, fault, with_body=with_body)

    def _send_file(self, path: Path, name: str, fault: str | None, *, with_body: bool) -> None:
        size = path.stat().st_size
        headers = {"ETag": _tag(path.stat()), "Last-Modified": formatdate(1e9, usegmt=True)}
        wanted = self.headers.get("Range")
        start, stop = 0, size
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1, size)
        if fault == "short":
            stop = start + (stop - start) // 2
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if not with_body:
            self._send(200, b"", {**headers, "Content-Length": str(size)})
            return
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        if fault == "cut":
            self._send(206, data[: len(data) // 2], {**headers, "Content-Length": str(len(data))})
            self.close_connection = True
            return
        if fault == "stalled":  # stops in the middle, for longer than any client waits
            self._send(206, data[:STALL_BYTES], {**headers, "Content-Length": str(len(data))})
            self.wfile.flush()
            time.sleep(STALL_S)
            self.close_connection = True
            return
        if fault == "gzip":
            self._send(206 if wanted else 200, gzip.compress(data), {**headers, "Content-Encoding": "gzip"})
            return
        if fault == "less":  # shorter than its headers promise
            data = data[: len(data) // 2]
        elif fault == "more":
            data += b"x" * 9
        if fault is None:  # counted before it is sent, because a client may read the counters at once
            with self.server.lock:
                self.server.ranges.append((name, start, stop))
        self._send(206 if wanted else 200, data, headers)

    def _listing(self, path: str, query: dict[str, list[str]]) -> bytes:
        first = int(query.get("continuation-token", ["0"])[0])
        rows, more = self.server.page(path.strip("/"), query.get("prefix", [""])[0], first)
        objects = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>{escape(tag)}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size, tag in rows
        )
        token = f"<NextContinuationToken>{first + PAGE}</NextContinuationToken>" if more else ""
        truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        return f"<ListBucketResult>{truncated}{objects}</ListBucketResult>".encode()

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self._send_body(body)

    def _send_body(self, body: bytes) -> None:
        if not self.server.link_bytes_per_s:
            self.wfile.write(body)
            return
        for start in range(0, len(body), _TURN):
            self.server.wait_for_link(len(body[start : start + _TURN]))
            self.wfile.write(body[start : start + _TURN])
            self.wfile.flush()


@contextlib.contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[ToyServer]:
    """Start a server of this folder, on a free port unless `port` is set."""
    server = ToyServer(folder, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def serving_a_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    """Start a server of `www` in this folder, also for `s3://`. What passes through this machine is in `node`."""
    (folder / "www").mkdir(exist_ok=True)
    (folder / "node").mkdir()
    get_temp_dir()  # of multiprocessing; the path below would be too long for its sockets
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "node"))
    monkeypatch.setenv("SAVABLE_CACHE", str(folder / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "5")
    with serving(folder / "www") as server:
        use_as_s3(server, monkeypatch)
        yield server
    close_scratch()


def s3_settings(server: ToyServer) -> dict[str, str]:
    """Return the environment in which `s3://` URLs refer to this server."""
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "toy",
        "AWS_SECRET_ACCESS_KEY": "toy",
    }


def use_as_s3(server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `s3://` URLs refer to this server."""
    for name, value in s3_settings(server).items():
        monkeypatch.setenv(name, value)
