"""`HubAddress`: a dataset on Hugging Face's Hub, or what lies in it: `hf://datasets/ORG/NAME[@REVISION][/PATH]`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from savable_pipeline.errors import ShardError

HUB = "hf://"
_ADDRESS = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FIXED = re.compile(r"(?<=^hf://datasets/)([^@]+)@[0-9a-f]{40}")


class HubAddress(NamedTuple):
    """What an address of the Hub names: `path` is empty for the whole dataset."""

    repo: str
    revision: str
    path: str

    @classmethod
    def of(cls, url: str) -> HubAddress:
        """The parts of an address. Raises `ShardError` for one that names no dataset."""
        found = _ADDRESS.fullmatch(url)
        if found is None:
            raise ShardError(
                f"{url}: of the Hub, datasets are read: hf://datasets/ORG/NAME, with @REVISION and /PATH behind it "
                "where they are wanted"
            )
        return cls(found["repo"], unquote(found["revision"] or "main"), (found["path"] or "").strip("/"))

    @property
    def is_fixed(self) -> bool:
        """Whether the revision is a commit: what is there never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def dataset(self) -> str:
        """The address of the whole dataset at the revision."""
        return f"{HUB}datasets/{self.repo}@{self.revision}"

    @property
    def download(self) -> str:
        """The command that copies it to a disk."""
        only = f" --include '{self.path}/*'" if self.path else ""
        name = self.repo.rpartition("/")[2]
        return f"hf download {self.repo} --repo-type dataset --revision {self.revision}{only} --local-dir {name}"

    def at(self, commit: str) -> str:
        """The same address with a commit in place of a branch or a tag."""
        return f"{HUB}datasets/{self.repo}@{commit}{'/' if self.path else ''}{self.path}"

    def below(self, name: str) -> str:
        """The path in the dataset of a name relative to this address."""
        return f"{self.path}/{name}" if self.path else name


def is_hub(url: str) -> bool:
    """Whether this is an address of the Hub."""
    return url.startswith(HUB)


def without_commit(address: str) -> str:
    """An address of the Hub without its commit, any other as it is: what caches files of all commits together."""
    return _FIXED.sub(r"\1", address)


def commits_of(addresses: Mapping[str, str]) -> dict[str, bytes]:
    """The commits among the addresses of a state, by what was named: the reverse of `addresses_of`."""
    return {name: HubAddress.of(at).revision.encode() for name, at in addresses.items() if is_hub(name)}


def addresses_of(pinned: Mapping[str, bytes]) -> dict[str, str]:
    """Where the datasets of the Hub lie that a run has pinned, by what was named: a state keeps it."""
    return {name: HubAddress.of(name).at(commit.decode()) for name, commit in pinned.items() if is_hub(name)}
