"""`at_commit`: addresses of the Hub with a commit in place of a branch or a tag, which may move under a run.

hf://datasets/org/name/data      named by the user, and kept as a reader's setting
hf://datasets/org/name@main      what is pinned: found once, sent to workers, kept in the state
hf://datasets/org/name@1f0c…/data    what is opened, everywhere
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from savable_pipeline.data.shards.paths import HubAddress, Shards, is_hub, spelled_out
from savable_pipeline.errors import RemoteError

if TYPE_CHECKING:
    from savable_pipeline.data.remote.session import Session


def at_commit(files: Shards, pinned: dict[str, bytes], session: Session) -> Shards:
    """The same files, of the Hub at the commits that are `pinned`; those that are not are found, and pinned.

    Raises `ShardError` for a dataset or a revision that is not there, `RemoteError`.
    """
    specs = spelled_out(files)
    if not any(map(is_hub, specs)):
        return files
    if importlib.util.find_spec("huggingface_hub") is None:  # finds it without importing it
        raise RemoteError("hf:// needs huggingface_hub: pip install 'savable_pipeline[hub]'")
    fixed = [_fixed(HubAddress.of(spec), pinned, session) if is_hub(spec) else spec for spec in specs]
    return fixed[0] if isinstance(files, str | os.PathLike) and len(fixed) == 1 else fixed


def _fixed(address: HubAddress, known: dict[str, bytes], session: Session) -> str:
    if address.is_fixed:
        return address.at(address.revision)
    if address.dataset not in known:
        known[address.dataset] = session.call("commit", address.dataset).encode()
    return address.at(known[address.dataset].decode())
