"""How long what fails for a moment is tried again: requests to servers, and files of a network disk.

ESTALE, ETIMEDOUT     only network disks fail so
EIO                   a network disk whose server does not answer; or a bad sector of a local one, tried once more
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
OF_NETWORK = (errno.ESTALE, errno.ETIMEDOUT)
_FLEETING = (*OF_NETWORK, errno.EIO)
_RETRY_S = 120.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 15.0
_NETWORK = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "beegfs", "9p", "afs", "wekafs", "virtiofs")


def retry_s() -> float:
    """For how many seconds a failing request is repeated: `SAVABLE_RETRY_S`, or 120. Raises ValueError."""
    given = os.environ.get("SAVABLE_RETRY_S", "")
    try:
        seconds = float(given) if given else _RETRY_S
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"SAVABLE_RETRY_S must be a number of seconds, not {given!r}")
    return seconds


def patiently(path: Path, act: Callable[[], T]) -> T:
    """What `act` returns; where it fails with an error of `_FLEETING`, what `again` returns or raises."""
    try:
        return act()
    except OSError as error:
        return again(path, error, act)


def again(path: Path, error: OSError, act: Callable[[], T]) -> T:
    """What `act` returns, tried again after this error about a file: of a network disk for `retry_s` seconds.

    Raises `RemoteError` where that is not enough, and OSError of a local disk, or that is of another kind.
    """
    began, wait_s = time.monotonic(), _FIRST_WAIT_S
    while error.errno in _FLEETING:
        network = error.errno in OF_NETWORK or _is_of_network(path)
        try:
            return act()
        except OSError as last:
            error = last
        if not network:
            break
        if time.monotonic() + wait_s > began + retry_s():
            failed = f"{path}: {error.strerror} for {time.monotonic() - began:.1f} s"
            raise RemoteError(f"{failed}. Check that its server is reachable, or raise SAVABLE_RETRY_S") from error
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    raise error


def _is_of_network(path: Path) -> bool:
    """Whether a file is on a network disk, as Linux lists what is mounted; False where nobody knows."""
    try:
        device = path.stat().st_dev
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError as error:
        return error.errno in _FLEETING
    kinds = {each[2]: each[each.index("-") + 1] for each in mounts}
    return kinds.get(f"{os.major(device)}:{os.minor(device)}", "").startswith(_NETWORK)
