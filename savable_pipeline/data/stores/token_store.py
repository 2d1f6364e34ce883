"""`TokenStore`: the record store of files of tokens; a sample is a document, or a window of `length` tokens."""

from __future__ import annotations

import logging
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.core.open_files import with_handles
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.part_types import find_part
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry, ShardList
from savable_pipeline.data.stores.file_store import FileStore
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.token_file import (
    ARRAY,
    FLAT,
    INDEXED,
    TYPES,
    Documents,
    TokenFileError,
    TokenLayout,
    digest_of,
    idx_of,
    layout_of,
    read_documents,
)
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

TOKENS_PART = "tokens"


class TokenStore(FileStore):
    """The documents, or windows of `length` tokens, of `.bin` (with `.idx`, or flat) and `.npy` files.

    Windows begin every `stride` tokens (None: `length`); a rest too short for one is no sample. `dtype` is the type of
    the tokens in flat `.bin` files, and in `.npy` files without a header. Raises ValueError for wrong settings,
    `ShardError`.
    """

    unit = "token"

    def __init__(
        self,
        found: IndexedFiles,
        *,
        length: int | None = None,
        stride: int | None = None,
        dtype: str | None = None,
    ) -> None:
        check_token_settings(length, stride, dtype)
        super().__init__(found)
        self.length, self.stride = length, stride or length
        self.files.fetch_rows(found.numbers)  # at once: of each file a few numbers
        self._layouts = [self._layout(shard, dtype) for shard in range(len(self.entries))]
        self.entries = ShardList.of([self._entry(shard, found.tolerant) for shard in range(len(self.entries))])
        self.firsts = np.concatenate([[0], np.cumsum(self.entries.samples)])
        self._sizes = self.entries.sizes.tolist()
        self._documents: dict[int, Documents] = {}
        self._checked: set[int] = set()

    def extensions(self, shard: int, row: int) -> list[str]:
        """`tokens`."""
        return [TOKENS_PART]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """The bytes of the tokens, as they lie in the file."""
        if extension != TOKENS_PART:
            find_part(extension, [TOKENS_PART])
        return self.files.read(shard, *self._place(shard, row))

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.generic]:
        """The tokens: (tokens,) of the type that they have in the file."""
        if extension != TOKENS_PART:
            find_part(extension, [TOKENS_PART])
        begin, size = self._place(shard, row)
        array = empty_bytes(size)
        self.files.read_into(array, shard, begin)
        return array.view(self._layouts[shard].dtype)

    def sizes(self, shard: int, row: int) -> dict[str, int]:
        """See `RecordStore.sizes`."""
        return {TOKENS_PART: self._place(shard, row)[1]}

    def offset(self, shard: int, row: int) -> int:
        """The number of the sample's first token in its file."""
        layout = self._layouts[shard]
        return (self._place(shard, row)[0] - layout.begin) // np.dtype(layout.dtype).itemsize

    def part_sizes(self) -> dict[str, Rows] | None:
        """The sizes of documents; None for windows, which are all alike."""
        if self.length is not None:
            return None
        sizes = [[self._place(shard, row)[1] for row in range(entry.samples)] for shard, entry in self._some()]
        return {TOKENS_PART: np.array([size for each in sizes for size in each], dtype=np.int64)}

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """The documents or windows."""
        begins, sizes = np.array([self._place(shard, row) for row in rows.tolist()], dtype=np.int64).T
        return begins, begins + sizes

    def _some(self) -> list[tuple[int, ShardEntry]]:
        return [(shard, entry) for shard, entry in enumerate(self.entries) if entry.samples]

    def _layout(self, shard: int, dtype: str | None) -> TokenLayout:
        layout = layout_of(self.places(shard))
        if layout.what != FLAT or shard in self.entries.faults:
            return layout
        if dtype is None and not self._is_array(shard):
            raise ValueError(
                f"{self.place(shard)}: a flat file of tokens has no .idx that says their type: give dtype="
            )
        if dtype is None:
            return layout
        return TokenLayout(FLAT, dtype, 0, self.entries[shard].size // np.dtype(dtype).itemsize, 0, 0)

    def _entry(self, shard: int, tolerant: bool) -> ShardEntry:
        """The entry with the samples that the settings make. Raises `ShardError` unless `tolerant`, ValueError."""
        entry, layout = self.entries[shard], self._layouts[shard]
        if entry.fault:
            return entry
        lost = self._no_header(shard) if layout.what == FLAT and self._is_array(shard) else ""
        fault = lost or (self._cut(shard) if layout.what == FLAT else "")
        if fault:
            if not tolerant:
                raise ShardError(f"{self.place(shard)}: {fault}")
            log.warning("%s: %s; going on with the samples before the rest", self.place(shard), fault)
            entry = msgspec.structs.replace(entry, fault=encodable(f"{entry.name}: {fault}"))
            if lost:
                return entry
        if self.length is not None:
            assert self.stride is not None
            return msgspec.structs.replace(entry, samples=max(0, (layout.tokens - self.length) // self.stride + 1))
        if layout.what == FLAT or (layout.what == ARRAY and not layout.row):
            raise ValueError(
                f"{self.place(shard)}: a flat file of tokens has no documents: give length=, a window's tokens"
            )
        return entry

    def _is_array(self, shard: int) -> bool:
        return self.entries.names[shard].endswith(".npy")

    def _no_header(self, shard: int) -> str:
        """Why an array without a header is not taken for bare numbers; "" if it is."""
        if not self._layouts[shard].dtype:
            return "no header of NumPy: it is damaged; or it is bare numbers, as OLMo-core writes them: give dtype="
        if any(layout.what == ARRAY for layout in self._layouts):
            return "no header of NumPy, where other files have one: it is damaged, copy it again; or read it by itself"
        return ""

    def _cut(self, shard: int) -> str:
        """The fault of a flat file that ends within a token."""
        size, dtype = self.entries[shard].size, self._layouts[shard].dtype
        if size % np.dtype(dtype).itemsize:
            return f"{size} bytes are no whole number of {dtype}; copy it again, or give the right dtype="
        return ""

    def _place(self, shard: int, row: int) -> tuple[int, int]:
        """Offset and size in bytes of a sample. Raises `ShardError` if the index of its documents is not right."""
        layout = self._layouts[shard]
        if shard not in self._checked:
            self._check(shard)
        width = np.dtype(layout.dtype).itemsize
        if self.length is not None:
            assert self.stride is not None
            return layout.begin + row * self.stride * width, self.length * width
        if layout.what == ARRAY:
            return layout.begin + row * layout.row * width, layout.row * width
        found = self._documents[shard]
        first, end = int(found.firsts[row]), int(found.firsts[row + 1])
        if not 0 <= first <= end <= len(found.lengths):
            raise self.damaged(shard, f"document {row}", f"sequences {first} to {end} of {len(found.lengths)}")
        size = self._sizes[shard]
        begin = int(found.pointers[first]) if first < len(found.lengths) else size
        stop = int(found.pointers[end]) if end < len(found.lengths) else size
        if not 0 <= begin <= stop <= size:
            raise self.damaged(shard, f"document {row}", f"the bytes {begin} to {stop} of {size}")
        return begin, stop - begin

    def _check(self, shard: int) -> None:
        """Raises `ShardError` unless the file, and its `.idx`, are as they were indexed."""
        place, file = self.place(shard), self.file(shard)
        try:
            idx = idx_of(file) if self._layouts[shard].what == INDEXED and self.length is None else None
            if idx is not None:
                self.files.watch_view(~shard, idx)
                if digest_of(file) != self.entries.digests[shard]:
                    raise self._rewritten(shard)
                self._documents[shard] = with_handles(partial(read_documents, idx))
        except TokenFileError as error:
            raise self.damaged(shard, "index", str(error)) from error
        except OSError as error:
            raise ShardError(
                f"{error.filename or place}: {error.strerror}; it was there when the shards were indexed",
                reason="missing shard" if isinstance(error, FileNotFoundError) else "unreadable shard",
            ) from error
        self._checked.add(shard)

    def _rewritten(self, shard: int) -> ShardError:
        return ShardError(
            f"{self.place(shard)}: it, or its .idx, was rewritten since it was indexed: start again to index it, or "
            "put the old file back",
            reason="changed shard",
        )


def check_token_settings(length: int | None, stride: int | None, dtype: str | None) -> None:
    """Raises ValueError for a wrong setting of a `TokenStore`."""
    for name, value in [("length", length), ("stride", stride)]:
        if value is not None and value < 1:
            raise ValueError(f"TokenReader: {name} must be at least 1, not {value}")
    if stride is not None and length is None:
        raise ValueError("TokenReader: stride is between windows; give their length= too")
    if dtype is not None and dtype not in TYPES[1:]:
        raise ValueError(f"TokenReader: dtype must be one of {', '.join(TYPES[1:])}, not {dtype!r}")
