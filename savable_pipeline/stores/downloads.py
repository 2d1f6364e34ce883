"""Addresses that are not read, such as `hf://`: the command that downloads what is there, for the error."""

from __future__ import annotations

import os

from savable_pipeline.errors import ShardError
from savable_pipeline.shards.paths import Shards

_NOT_READ = ("hf",)
_REPOSITORIES = {"datasets": "dataset", "spaces": "space"}


def check_address(files: Shards) -> None:
    """Raises `ShardError` for an address that is not read, with the command that downloads what is there."""
    for spec in [files] if isinstance(files, str | os.PathLike) else files:
        url = os.fspath(spec)
        if url.partition("://")[0] in _NOT_READ and not os.path.lexists(url):
            raise ShardError(f"{url}: this address is not read; download the files first: `{download(url)}`")


def download(url: str) -> str:
    """The command that downloads what a URL names.

    >>> from savable_pipeline.stores.downloads import download
    >>> download("hf://datasets/user/name@v2/data/*.parquet")
    "hf download user/name --repo-type dataset --revision v2 --include 'data/*.parquet' --local-dir name"
    """
    scheme, _, place = url.partition("://")
    if scheme == "hf":
        return _hub(place)
    folder, _, pattern = url.rpartition("/")
    tools = {
        "s3": f"aws s3 cp --recursive {folder} data --exclude '*' --include '{pattern or '*'}'",
        "gs": f"gcloud storage cp --recursive '{url}' data",
    }
    return tools.get(scheme, f"wget -P data {url}")


def _hub(place: str) -> str:
    parts = place.split("/")
    kind = _REPOSITORIES.get(parts[0])
    owner, name, *rest = [*(parts[1:] if kind else parts), "", ""]
    name, _, revision = name.partition("@")
    pattern = "/".join(part for part in rest if part)
    options = {"repo-type": kind, "revision": revision, "include": pattern and f"'{pattern}'", "local-dir": name}
    return " ".join([f"hf download {owner}/{name}", *(f"--{key} {value}" for key, value in options.items() if value)])
