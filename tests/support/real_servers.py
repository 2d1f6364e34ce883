"""Real servers on this machine: nginx with a folder, and moto's S3 with a bucket of a folder's files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
_NO_ACCOUNT = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
_CONFIG = """
worker_processes 2; daemon off; pid {root}/pid; error_log {root}/error.log;
events {{ worker_connections 256; }}
http {{
  log_format status $status; access_log {root}/access.log status; sendfile on;
  client_body_temp_path {root}/t1; proxy_temp_path {root}/t2; fastcgi_temp_path {root}/t3; uwsgi_temp_path {root}/t4;
  scgi_temp_path {root}/t5; limit_req_zone $server_addr zone=all:1m rate=200r/s;
  server {{
    listen 127.0.0.1:{port}; root {root}/www;
    location = /version {{ access_log off; return 200 "{version}"; }}
    location = /status {{ access_log off; stub_status; }}
    location / {{ {rule} }}
  }}
}}
"""


class Nginx:
    """An nginx that serves `root`/www on a free port. Everybody must be able to read `www`: its workers may be
    nobody.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._version = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._write("")
        self._process = subprocess.Popen([str(NGINX), "-c", str(root / "nginx.conf")], stderr=subprocess.DEVNULL)
        self._wait_for_version()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _write(self, rule: str) -> None:
        self._version += 1
        text = _CONFIG.format(root=self._root, port=self._port, version=self._version, rule=rule)
        (self._root / "nginx.conf").write_text(text)

    def _wait_for_version(self) -> None:
        while self._get("version") != str(self._version):
            time.sleep(0.02)

    def _get(self, path: str) -> str:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/{path}", timeout=5) as answer:
            return str(answer.read().decode())
        return ""

    def follow(self, rule: str) -> None:
        """Serve by another rule, in nginx's syntax, from now on. An empty rule serves files."""
        self._write(rule)
        self._process.send_signal(signal.SIGHUP)
        self._wait_for_version()

    def answers(self) -> Counter[str]:
        """Count the answered requests by status. 444 is a connection that was closed without an answer."""
        return Counter((self._root / "access.log").read_text().split())

    def kill_workers_while_they_send(self) -> None:
        """Wait until a transfer has started, and kill the workers during it. nginx itself starts others."""
        while "Writing: 1 " in self._get("status"):  # the request for the status itself is the only one
            time.sleep(0.02)
        workers = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self._process.pid)], capture_output=True, text=True)
        for pid in workers.stdout.split():
            os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def nginx(root: Path) -> Iterator[Nginx]:
    """Start an nginx. The test is skipped if it is not installed."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    server = Nginx(root)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def bucket_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put the files of a folder into the bucket `data` of moto's server, for s3:// and gs://; yields boto3's view.

    Google's servers use the same protocol with obstore, except for the signatures.
    """
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise it logs a line per request
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "toy",
            "AWS_SECRET_ACCESS_KEY": "toy",
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**_NO_ACCOUNT, "gcs_base_url": f"http://{host}:{port}"}),
        }.items():
            monkeypatch.setenv(name, value)
        bucket = boto3.resource("s3", region_name="us-east-1").Bucket("data")
        bucket.create()
        for path in folder.rglob("*"):
            if path.is_file():
                name = f"some/where/{path.relative_to(folder)}"
                bucket.upload_file(str(path), name, ExtraArgs={"ACL": "public-read"})
        yield bucket
    finally:
        server.stop()
