"""Addresses of the hub, `hf://`, are not read: the command that downloads what is there, for the error."""

from __future__ import annotations

import os

from savable_pipeline.data.shards.paths import Shards
from savable_pipeline.errors import ShardError

_REPOSITORIES = {"datasets": "dataset", "spaces": "space"}


def check_address(files: Shards) -> None:
    """Raises `ShardError` for an address of the hub, with the command that downloads what is there."""
    for spec in [files] if isinstance(files, str | os.PathLike) else files:
        url = os.fspath(spec)
        if url.startswith("hf://") and not os.path.lexists(url):
            raise ShardError(f"{url}: an address of the hub is not read; download the files first: `{download(url)}`")


def download(url: str) -> str:
    """The command that downloads what an address of the hub names.

    >>> from savable_pipeline.data.stores.downloads import download
    >>> download("hf://datasets/user/name@v2/data/*.parquet")
    "hf download user/name --repo-type dataset --revision v2 --include 'data/*.parquet' --local-dir name"
    """
    parts = url.partition("://")[2].split("/")
    kind = _REPOSITORIES.get(parts[0])
    owner, name, *rest = [*(parts[1:] if kind else parts), "", ""]
    name, _, revision = name.partition("@")
    pattern = "/".join(part for part in rest if part)
    options = {"repo-type": kind, "revision": revision, "include": pattern and f"'{pattern}'", "local-dir": name}
    return " ".join([f"hf download {owner}/{name}", *(f"--{key} {value}" for key, value in options.items() if value)])
