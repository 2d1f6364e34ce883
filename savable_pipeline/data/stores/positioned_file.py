"""`PositionedFile`: an open shard as a file that other libraries read, without a descriptor or a thread of its own.

It does not keep `files` alive: whoever reads it is C++, and a circle of references through that is never collected.

    files ──▶ store ──▶ pq.ParquetFile ── C++ ──▶ PositionedFile ╌╌ weak ╌╌▶ files
"""

from __future__ import annotations

import weakref

from savable_pipeline.data.stores.member_file import SpanFile
from savable_pipeline.data.stores.shard_files import ShardFiles


class PositionedFile(SpanFile):
    """A shard of `files`, `size` bytes long: each read is positioned, from a descriptor that was checked.

    To be used only as long as `files` are there.
    """

    def __init__(self, files: ShardFiles, shard: int, size: int) -> None:
        weak = weakref.ref(files)

        def read(offset: int, wanted: int) -> bytes:
            found = weak()
            assert found is not None, "the store keeps them"
            return found.read(shard, offset, wanted)

        super().__init__(read, 0, size)
