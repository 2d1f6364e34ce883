"""`Hub`: commits, files and download URLs of datasets on Hugging Face's Hub.

    hf://datasets/ORG/NAME@REVISION     dataset_info      ──▶ the commit            once for processes that ask together
    hf://datasets/ORG/NAME@COMMIT/PATH  list_repo_tree    ──▶ names, sizes, hashes   once a node: CACHE/listings/HASH
    …/FILE                              HEAD of /resolve/ ──▶ a URL in a store on another host, signed for about an
                                                              hour; for a small file, a URL on the Hub itself

The library `huggingface_hub` sends these requests, with the token, which only the Hub gets. If the Hub answers 429 with
a time, all processes of the node wait until then. CACHE/hub/wait has that time, in seconds since 1970.

This is not the library's `HfFileSystem`. If the Hub answers 429 for 3 s, four processes of a node send it one request
here and continue, while those with `HfFileSystem` 2.4 send four, and each raises.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

from savable_pipeline.data.remote.cache_files import flock, private_file, private_folder
from savable_pipeline.data.remote.listing import Listing, shared_answer
from savable_pipeline.data.shards.paths import NO_SUCH_PATH, HubAddress
from savable_pipeline.errors import RemoteError, ShardError

T = TypeVar("T")
log = logging.getLogger(__name__)

_MOST_WAITING_S = 3600.0  # seconds that one request waits at most, in all, for a Hub that answers 429
_RESET = re.compile(r";\s*t\s*=\s*(\d+)")  # seconds until the window ends, in the header RateLimit
_MOST_FILES = 1024  # download URLs in memory


class HubFile(NamedTuple):
    """Download URL of a file, the token to send there if any, and the content's hash."""

    url: str
    token: str
    content: str


class Hub:
    """Client of the Hub at `HF_ENDPOINT`, with `HF_TOKEN`. Answers are cached.

    Each method raises `ShardError` for missing files, `RemoteError` for forbidden ones, and errors of `huggingface_hub`
    for what is worth a retry.
    """

    def __init__(self, cache: Path, timeout_s: float) -> None:
        self._cache, self._timeout_s = cache, timeout_s
        self._listings: dict[str, Listing] = {}
        self._files: dict[tuple[str, str], HubFile] = {}
        self._in_progress: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)

    def commit(self, dataset: str) -> str:
        """Return the commit of a dataset at a branch or tag."""
        from huggingface_hub import HfApi  # this takes 0.3 s, and most processes do not use the Hub

        address = HubAddress.of(dataset)

        def request() -> str:
            return str(HfApi().dataset_info(address.repo, revision=address.revision, timeout=self._timeout_s).sha)

        return self._share_answer(dataset, request, str)

    def listing(self, root: str) -> Listing:
        """Return every file below `root`, with relative names and hashes as stamps."""
        if root not in self._listings:
            permanent = HubAddress.of(root).is_fixed
            found = self._share_answer(root, lambda: _list_files(root), Listing, permanent=permanent)
            if not permanent:
                return found
            self._listings[root] = found
        return self._listings[root]

    def stat(self, root: str, name: str) -> tuple[int, str] | None:
        """Return size and content hash of a file, or None if there is none."""
        return self.listing(root).find(name)

    def file(self, root: str, name: str) -> HubFile:
        """Return the download URL of a file, which is requested once until `forget`."""
        with self._in_progress[root, name]:
            if (found := self._files.get((root, name))) is None:
                found = self._send_paced(f"{root}/{name}", lambda: self._request_url(root, name))
                if len(self._files) >= _MOST_FILES:
                    self._files.clear()
                self._files[root, name] = found
            return found

    def forget(self, root: str, name: str) -> None:
        """Forget the download URL of a file, which no longer works."""
        self._files.pop((root, name), None)

    def _request_url(self, root: str, name: str) -> HubFile:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        if (stat := self.stat(root, name)) is None:
            raise _not_found(f"{root}/{name}")
        _, content = stat
        address = HubAddress.of(root)
        url = hf_hub_url(address.repo, address.below(name), repo_type="dataset", revision=address.revision)
        found = get_hf_file_metadata(url, timeout=self._timeout_s)
        if found.etag and len(found.etag) == len(content) and found.etag != content:
            raise ShardError(
                f"{root}/{name}: the Hub sent {found.etag}, but lists {content}. Check the mirror in HF_ENDPOINT",
                reason="changed shard",
            )
        target = urljoin(url, found.location)
        is_on_hub = _origin(target) == _origin(constants.ENDPOINT)
        token = build_hf_headers().get("authorization", "") if is_on_hub else ""
        return HubFile(target, token, content)

    def _share_answer(self, address: str, send: Callable[[], T], kind: type[T], *, permanent: bool = False) -> T:
        from huggingface_hub import constants

        question = f"{constants.ENDPOINT} {address}"
        return shared_answer(self._cache, question, lambda: self._send_paced(address, send), kind, permanent=permanent)

    def _send_paced(self, address: str, send: Callable[[], T]) -> T:
        """Call `send` when the node may send requests, and again after each answer 429."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        waited = 0.0
        while True:
            self._wait()
            try:
                return send()
            except OfflineModeIsEnabled as error:
                raise RemoteError(f"{address}: not cached, and HF_HUB_OFFLINE is set. Unset it") from error
            except HfHubHTTPError as error:
                if (pause_s := _pause_of(error)) is None:
                    raise _final_error(address, error) from error
                waited += pause_s
                if waited > _MOST_WAITING_S:
                    raise RemoteError(
                        f"{address}: the Hub answers 429, too many requests, after {waited - pause_s:g} s of waiting. "
                        "Set HF_TOKEN for a higher limit, or download the dataset\n"
                        "The loader's state is whole: save it or continue"
                    ) from error
                log.warning("%s: the Hub answers 429, too many requests. This node waits for %g s", address, pause_s)
                self._pause_all(pause_s)

    def _wait(self) -> None:
        """Wait until the Hub accepts requests."""
        with contextlib.suppress(OSError, ValueError):
            while True:
                wait_s = float(self._wait_file().read_text()) - time.time()
                if not 0 < wait_s <= _MOST_WAITING_S:
                    return
                # random, so that processes do not wake at the same instant
                time.sleep(wait_s + SystemRandom().uniform(0, min(1.0, wait_s / 10)))

    def _pause_all(self, seconds: float) -> None:
        """Make all processes of the node wait for `seconds`, or longer if they do already."""
        until = time.time() + seconds
        with os.fdopen(private_file(self._wait_file(), os.O_RDWR | os.O_CREAT), "r+") as file:
            flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(ValueError):
                until = max(until, float(file.read()))
            file.seek(0)
            file.write(f"{until:.3f}")

    def _wait_file(self) -> Path:
        return private_folder(self._cache / "hub") / "wait"


def _list_files(root: str) -> Listing:
    """List the files below an address, page by page."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    address = HubAddress.of(root)
    prefix = len(address.path) + 1 if address.path else 0
    found = HfApi().list_repo_tree(
        address.repo, address.path or None, recursive=True, revision=address.revision, repo_type="dataset"
    )
    return Listing.of(
        (each.path[prefix:], each.size, each.lfs.sha256 if each.lfs else each.blob_id)
        for each in found
        if isinstance(each, RepoFile)
    )


def _pause_of(error: Any) -> float | None:
    """Return the seconds after which the Hub accepts a retry, or None."""
    if error.response.status_code != 429:
        return None
    after = error.response.headers.get("Retry-After", "").strip()
    if after.isdecimal():
        return float(after)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    reset = _RESET.search(error.response.headers.get("RateLimit", ""))
    return None if reset is None else float(reset[1])


def _final_error(address: str, error: Any) -> Exception:
    """Return our error for a final answer of the Hub, or `error` if a retry may help."""
    from huggingface_hub import constants, errors

    parsed = HubAddress.of(address)
    page, status = f"{constants.ENDPOINT}/datasets/{parsed.repo}", error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return RemoteError(
            f"{address}: its terms are not accepted ({status}). Accept them at {page}, and set HF_TOKEN to your token"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ShardError(
            f"{address}: the dataset has no revision {parsed.revision!r}. See {page}/tree/main for branches and tags",
            reason=NO_SUCH_PATH,
        )
    if isinstance(error, errors.EntryNotFoundError):
        return _not_found(address)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return ShardError(
            f"{address}: no such dataset, or a private one ({status}). Check {page}, and set HF_TOKEN if it is private",
            reason=NO_SUCH_PATH,
        )
    if status == 403:
        return RemoteError(f"{address}: the Hub refuses access (403). Accept the terms at {page}, and set HF_TOKEN")
    return error  # type: ignore[no-any-return]


def _not_found(address: str) -> ShardError:
    return ShardError(f"{address}: not found in the dataset at this commit", reason=NO_SUCH_PATH)


def _origin(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme, 0)
