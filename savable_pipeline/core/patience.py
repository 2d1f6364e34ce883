"""Retries after errors that may pass: requests to servers, files on network disks.

Errors of files that are retried:

    ESTALE, ETIMEDOUT     errors of network disks only
    EIO                   an unreachable network disk, or a bad sector of a local one, which is tried once more
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from savable_pipeline.errors import RemoteError

T = TypeVar("T")
NETWORK_ERRORS = (errno.ESTALE, errno.ETIMEDOUT)
_TRANSIENT = (*NETWORK_ERRORS, errno.EIO)
_RETRY_S = 120.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 15.0
_NETWORK_TYPES = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "beegfs", "9p", "afs", "wekafs", "virtiofs")


def retry_s() -> float:
    """Return how long a failing request is retried: `SAVABLE_RETRY_S`, or 120 s.

    Raises ValueError if `SAVABLE_RETRY_S` is not a number of at least 0.
    """
    configured = os.environ.get("SAVABLE_RETRY_S", "")
    try:
        seconds = float(configured) if configured else _RETRY_S
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"SAVABLE_RETRY_S must be a number of seconds, not {configured!r}")
    return seconds


def with_retries(path: Path, act: Callable[[], T]) -> T:
    """Return what `act` returns, with `retry` after an OSError."""
    try:
        return act()
    except OSError as error:
        return retry(path, error, act)


def retry(path: Path, error: OSError, act: Callable[[], T]) -> T:
    """Return what `act` returns when it is retried after `error`, if that may pass.

    It is retried for `retry_s()` seconds on a network disk, else once. Raises `RemoteError` if retries on a network
    disk do not help, and other errors as they are.
    """
    started, wait_s = time.monotonic(), _FIRST_WAIT_S
    while error.errno in _TRANSIENT:
        on_network = error.errno in NETWORK_ERRORS or _is_on_network_disk(path)
        try:
            return act()
        except OSError as last:
            error = last
        if not on_network:
            break
        if time.monotonic() + wait_s > started + retry_s():
            failed = f"{path}: {error.strerror} for {time.monotonic() - started:.1f} s"
            raise RemoteError(f"{failed}. Check that its server is reachable, or raise SAVABLE_RETRY_S") from error
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    raise error


def _is_on_network_disk(path: Path) -> bool:
    """Return whether a file is on a network disk, by Linux's list of mounts.

    False if that is unknown.
    """
    try:
        device = path.stat().st_dev
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError as error:
        return error.errno in _TRANSIENT
    # A line is "36 35 0:42 / /data rw shared:1 - nfs4 server:/data rw": device 0:42, and the type after the dash.
    types = {fields[2]: fields[fields.index("-") + 1] for fields in mounts}
    return types.get(f"{os.major(device)}:{os.minor(device)}", "").startswith(_NETWORK_TYPES)
