"""The format of JSON files that hold one list, such as LLaVA's own, and the store that reads them: an object a sample.

Places of a file in the index: the offset of each element, then that of what follows the last. To index a file it is
read as a whole.
"""

from __future__ import annotations

import msgspec
import numpy as np

from savable_pipeline.core.file_heads import HEAD, text_fault
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.byte_source import ByteSource
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import ShardTable
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.file_kinds import JSON_FILES
from savable_pipeline.data.stores.jsonl import MARK, digest_of, is_as_indexed
from savable_pipeline.data.stores.table_store import TableStore


def read_table(file: ByteSource, name: str) -> ShardTable:
    """Entry and elements of a file; damage is the entry's fault, and there are no samples."""
    fault, begins = text_fault(file.read_at(0, HEAD), file.name), [0]
    if not fault:
        file.expect([(0, file.size)])
        try:
            begins = _element_begins(file.read_at(0, file.size))
        except msgspec.DecodeError as error:
            fault = f"not a whole list of objects: {error}"
    places = np.array(begins, "<u8")
    fault = encodable(f"{name}: {fault}") if fault else ""
    return ShardTable(ShardEntry(name, file.size, len(places) - 1, digest_of(file, places), fault), places.tobytes())


def _element_begins(data: bytes) -> list[int]:
    """Where each element of the list begins, and the last ends. Raises `msgspec.DecodeError`."""
    end = len(MARK) if data.startswith(MARK) else 0
    begins = []
    for element in msgspec.json.decode(memoryview(data)[end:], type=list[msgspec.Raw]):
        raw = bytes(element)
        begins.append(data.index(raw, end))  # only commas and blanks lie between two elements
        end = begins[-1] + len(raw)
    return [*begins, end]


JSON = FileFormat(
    "json", JSON_FILES, "savable_pipeline.data.stores.json_array:JSON", read_table, is_as_indexed, no_places=1
)


class JsonArrayStore(TableStore):
    """The elements of lists in JSON files."""

    def body(self, shard: int, raw: bytes, begin: int) -> bytes:
        """See `TableStore.body`."""
        return raw.rstrip().removesuffix(b",").rstrip()
