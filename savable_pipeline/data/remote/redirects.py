"""Refuses a server of S3 that sends requests to another host: obstore follows, with the session's token.

    GET http://endpoint/bucket, unsigned ──▶ 307, Location: http://elsewhere/bucket      RemoteError

The client has no setting for it, so that a server is asked once, by a request that carries no credentials and follows
nothing. One that redirects other requests than this one is not found. AWS itself, which is there where no endpoint is
given, is not asked.
"""

from __future__ import annotations

import contextlib
import http.client
import os
from urllib.parse import urljoin, urlsplit

from savable_pipeline.core.addresses import clean_address
from savable_pipeline.errors import RemoteError

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def check_endpoint(root: str, timeout_s: float) -> None:
    """Raises `RemoteError` if the server of a bucket redirects to another host. What else fails is told later."""
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None:
        return
    url = f"{endpoint.rstrip('/')}/{urlsplit(root).netloc}?list-type=2&max-keys=1"
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        target = _redirect_of(url, timeout_s)
        if target is not None and _host(target) != _host(url):
            raise RemoteError(
                f"{root}: {clean_address(endpoint)} redirects to {clean_address(target)}, and the requests would take "
                "their credentials there; give the address of the server itself as AWS_ENDPOINT_URL"
            )


def _redirect_of(url: str, timeout_s: float) -> str | None:
    """Where a request for `url` is sent on to; None if it is not."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}")
        answer = connection.getresponse()
        target = answer.getheader("Location")
        return urljoin(url, target) if 300 <= answer.status < 400 and target else None
    finally:
        connection.close()


def _host(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
