"""Token files and their store: a sample is a document, or a window of tokens.

It reads Megatron's `.bin` with its `.idx`, `.npy`, and flat `.bin` or `.npy` of a type that the user passes.

    .idx   "MMIDIDX" 0 0 │ version u64 = 1 │ type u8 │ sequences u64 │ documents u64 │ lengths i32 (sequences,)
           │ pointers i64 (sequences,): bytes in the .bin │ firsts i64 (documents,): sequences, the last one the end

Blob of a file in the index: its kind, the number of its type (0: to be passed), the byte where tokens start, tokens,
documents, and tokens of a row (.npy of two dimensions).
"""

from __future__ import annotations

import io
import logging
import struct
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from savable_pipeline.core.batch_memory import empty_bytes
from savable_pipeline.core.files import with_handles, with_retries
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.shards.byte_source import ByteSource, WholeFile, opened
from savable_pipeline.data.shards.index import Format, IndexedFiles, ShardIndex, ShardTable
from savable_pipeline.data.shards.part_types import find_part
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry, ShardList
from savable_pipeline.data.stores.record_store import FileStore, hash_some
from savable_pipeline.data.stores.shard_files import unreadable_error
from savable_pipeline.errors import ShardError

FLAT, INDEXED, ARRAY = 0, 1, 2  # kinds of files: bare numbers, a .bin with an .idx, an .npy
_header_lock = threading.Lock()  # NumPy parses a header with `ast`, which fails in two threads (CPython's gh-106905)
# names of token types by their number in an .idx; number 0 means that the user must pass the type
TYPES = ("", "uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16", "uint32", "uint64")
_MAGIC = b"MMIDIDX\0\0"
_HEAD = struct.Struct("<9sQBQQ")
_NO_LAYOUT = bytes(48)  # blob of a damaged file
_IDX = ".idx"  # suffix of the sidecar of a .bin
_LONGEST_HEADER = 1 << 14  # most bytes of the header of a .npy
_SAMPLED, _BLOCKS = 1 << 12, 64  # bytes to compare at each of this many positions of a file
_CHECKED = 1 << 20  # sequences to check at a time
log = logging.getLogger(__name__)

TOKENS_PART = "tokens"


class TokenFileError(ValueError):
    """Error for an invalid file of tokens or its `.idx`."""


class TokenLayout(NamedTuple):
    """Index blob of a file by field."""

    layout_kind: int = FLAT
    kind: int = 0  # number of the token type; 0 if the user must pass it
    begin: int = 0  # offset of the first token in bytes
    tokens: int = 0
    documents: int = 0
    row_tokens: int = 0  # tokens of a row of an array of two dimensions, or 0

    @property
    def dtype(self) -> str:
        """Return the name of the token type, or "" if the user must pass it."""
        return TYPES[self.kind]


@dataclass(frozen=True, slots=True)
class Documents:
    """Memory-mapped arrays of an `.idx`.

    `firsts` are the first sequences of documents, then the end.
    """

    lengths: NDArray[np.int32]  # (sequences,) in tokens
    pointers: NDArray[np.int64]  # (sequences,) in bytes
    firsts: NDArray[np.int64]  # (documents + 1,)
    dtype: str


def idx_of(file: ByteSource) -> Path | None:
    """Return the `.idx` of a `.bin`, or None."""
    return file.sidecar(_IDX) if file.name.lower().endswith(".bin") else None


def read_token_table(file: ByteSource, name: str) -> ShardTable:
    """Return entry and layout of a file. If it is damaged, the entry has the error."""
    try:
        layout = _layout_in(file)
    except TokenFileError as error:
        return ShardTable(ShardEntry(name, file.size, 0, 0, encodable(f"{name}: {error}")), _NO_LAYOUT)
    entry = ShardEntry(name, file.size, layout.documents, digest_of(file))
    return ShardTable(entry, np.array(layout, "<u8").tobytes())


def digest_of(file: ByteSource) -> int:
    """Return a hash of a file's size, of some of its bytes, and of its `.idx`."""
    digest = xxh3_64()
    _add_file(digest, file)
    if (idx := idx_of(file)) is not None:
        with opened(idx) as sidecar:
            _add_file(digest, sidecar)
    return digest.intdigest()


def read_documents(idx: Path) -> Documents:
    """Return the arrays of an `.idx`. Raises `TokenFileError`, OSError."""
    with opened(idx) as file:
        head, idx_size = file.read_at(0, _HEAD.size), file.size
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise TokenFileError(f"{idx.name} is not a Megatron index. Write it again, or move it away and pass dtype=")
    _, version, kind, sequences, documents = _HEAD.unpack(head)
    if version != 1 or not 0 < kind < 9:
        raise TokenFileError(f"{idx.name}: unknown version {version} or type {kind}. Write it again")
    needed = _HEAD.size + 12 * sequences + 8 * documents
    if idx_size not in (needed, needed + sequences):  # a file may have one more byte per sequence, its mode
        raise TokenFileError(f"{idx.name}: {idx_size} bytes, but its header says {needed}. Copy it again")
    raw = np.frombuffer(WholeFile(idx).view, np.uint8)
    ends = np.cumsum([_HEAD.size, 4 * sequences, 8 * sequences, 8 * documents]).tolist()
    bounds = zip(ends, ends[1:], ("<i4", "<i8", "<i8"), strict=False)
    lengths, pointers, firsts = (raw[begin:end].view(dtype) for begin, end, dtype in bounds)
    return Documents(lengths, pointers, firsts, TYPES[kind])


def tokens_match_index(file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Return whether a file and its `.idx` have the same sizes and sampled bytes.

    Raises OSError.
    """
    return digest_of(file) == int(index.shards.digests[number])


def _add_file(digest: Any, file: ByteSource) -> None:
    """Add the size and some bytes of a file to a hash."""
    digest.update(str(file.size).encode())
    hash_some(digest, file, _SAMPLED, _BLOCKS)


def _layout_in(file: ByteSource) -> TokenLayout:
    size = file.size
    if file.name.lower().endswith(".npy"):
        return _array_layout(file, size)
    if (idx := idx_of(file)) is None:
        return TokenLayout()
    found = read_documents(idx)
    _check_documents(idx.name, found, size)
    width = np.dtype(found.dtype).itemsize
    return TokenLayout(INDEXED, TYPES.index(found.dtype), 0, size // width, max(0, len(found.firsts) - 1))


def _array_layout(file: ByteSource, size: int) -> TokenLayout:
    head = io.BytesIO(file.read_at(0, min(size, _LONGEST_HEADER)))
    if not head.getvalue().startswith(np.lib.format.MAGIC_PREFIX):
        # Either numbers without a header, as OLMo-core writes them, or a damaged file. It is read as numbers if the
        # user passes their type, and is an error otherwise.
        return TokenLayout()
    try:
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with _header_lock:  # one thread at a time, because NumPy's parser fails in two
            shape, fortran, dtype = read(head)
    except (ValueError, EOFError, SyntaxError, TypeError, TokenError) as error:  # TokenError is of Python's tokenizer
        raise TokenFileError(f"not an .npy file, or its header is damaged: {error}. Write it again") from error
    # The shape is (tokens,) or (rows, tokens of a row). With `fortran`, the file has column after column.
    if dtype.name not in TYPES or dtype.newbyteorder("<") != dtype or len(shape) not in (1, 2) or fortran:
        raise TokenFileError(f"array of {dtype} and shape {shape}: tokens must be little-endian numbers, in rows")
    tokens, begin = int(np.prod(shape, dtype=object)), head.tell()
    if begin + tokens * dtype.itemsize != size:
        raise TokenFileError(f"{size} bytes, but its header says {begin + tokens * dtype.itemsize}. Copy it again")
    rows, row_tokens = shape if len(shape) == 2 else (0, 0)
    return TokenLayout(ARRAY, TYPES.index(dtype.name), begin, tokens, rows, row_tokens)


def _check_documents(idx: str, found: Documents, size: int) -> None:
    """Raise `TokenFileError` unless sequences fill the `.bin` and documents consist of all of them."""
    width, end = np.dtype(found.dtype).itemsize, 0
    for first in range(0, len(found.lengths), _CHECKED):
        lengths = found.lengths[first : first + _CHECKED].astype(np.int64)
        if int(lengths.min()) < 0:
            raise TokenFileError(f"{idx}: a sequence of {lengths.min()} tokens. Write it again")
        begins = end + np.cumsum(lengths) * width - lengths * width
        wrong = np.flatnonzero(found.pointers[first : first + _CHECKED] != begins)
        if len(wrong):
            number = first + int(wrong[0])
            raise TokenFileError(
                f"{idx}: sequence {number} starts at byte {found.pointers[number]}, but the last one ends at "
                f"{begins[wrong[0]]}. Write it again"
            )
        end = int(begins[-1] + lengths[-1] * width)
    if end != size:
        raise TokenFileError(f"{idx}: its sequences take {end} bytes, the .bin has {size}. Copy both again")
    firsts = found.firsts
    if not len(firsts) or firsts[0] or firsts[-1] != len(found.lengths) or (np.diff(firsts) < 0).any():
        raise TokenFileError(f"{idx}: its documents do not cover its {len(found.lengths)} sequences. Write it again")


class TokenStore(FileStore):
    """Documents, or windows of `length` tokens, of `.bin` and `.npy` files.

    A `.bin` is flat or has an `.idx`.

    Windows start every `stride` tokens (None: `length`). A remainder shorter than a window is dropped. `dtype` is the
    type of the tokens in flat `.bin` files, and in `.npy` files without a header. `documents_or` is the `length` for a
    file without documents. Raises ValueError for wrong settings, `ShardError`.
    """

    unit = "token"

    def __init__(
        self,
        found: IndexedFiles,
        *,
        length: int | None = None,
        stride: int | None = None,
        dtype: str | None = None,
        documents_or: int | None = None,
    ) -> None:
        check_token_settings(length, stride, dtype)
        super().__init__(found)
        self.files.fetch_rows(found.numbers)  # all at once, because each file has only a few numbers
        self._layouts = [self._layout(shard, dtype) for shard in range(len(self.entries))]
        if length is None and not all(each.layout_kind == INDEXED or each.row_tokens for each in self._layouts):
            length = documents_or
        self.length, self.stride = length, stride or length
        self.entries = ShardList.of([self._entry(shard, found.tolerant) for shard in range(len(self.entries))])
        self.firsts = np.concatenate([[0], np.cumsum(self.entries.samples)])
        self._sizes = self.entries.sizes.tolist()
        self._documents: dict[int, Documents] = {}
        self._checked: set[int] = set()

    def extensions(self, shard: int, row: int) -> list[str]:
        """Return `tokens`."""
        return [TOKENS_PART]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """Return the bytes of the tokens, as stored in the file."""
        if extension != TOKENS_PART:
            find_part(extension, [TOKENS_PART])  # raises KeyError for another name; case does not matter
        return self.files.read(shard, *self._extent(shard, row))

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.generic]:
        """Return the tokens: (tokens,) of the type in the file."""
        if extension != TOKENS_PART:
            find_part(extension, [TOKENS_PART])  # raises KeyError for another name; case does not matter
        begin, size = self._extent(shard, row)
        array = empty_bytes(size)
        self.files.read_into(array, shard, begin)
        return array.view(self._layouts[shard].dtype)

    def sizes(self, shard: int, row: int) -> dict[str, int]:
        """See `RecordStore.sizes`."""
        return {TOKENS_PART: self._extent(shard, row)[1]}

    def offset(self, shard: int, row: int) -> int:
        """Return the number of the sample's first token in its file."""
        layout = self._layouts[shard]
        return (self._extent(shard, row)[0] - layout.begin) // np.dtype(layout.dtype).itemsize

    def part_sizes(self) -> dict[str, Rows] | None:
        """Return the sizes of documents, or None for windows, whose sizes are equal."""
        if self.length is not None:
            return None
        counts = enumerate(self.entries.samples.tolist())
        sizes = [self._extent(shard, row)[1] for shard, count in counts for row in range(count)]
        return {TOKENS_PART: np.array(sizes, dtype=np.int64)}

    def byte_ranges(self, shard: int, rows: Rows) -> tuple[Rows, Rows]:
        """Return the byte ranges of the documents or windows."""
        begins, sizes = np.array([self._extent(shard, row) for row in rows.tolist()], dtype=np.int64).T
        return begins, begins + sizes

    def _layout(self, shard: int, dtype: str | None) -> TokenLayout:
        layout = TokenLayout(*self.blob(shard).tolist())
        if layout.layout_kind != FLAT or shard in self.entries.faults:
            return layout
        if dtype is not None:
            tokens = self.entries[shard].size // np.dtype(dtype).itemsize
            return TokenLayout(FLAT, TYPES.index(dtype), tokens=tokens)
        if not self._is_array(shard):
            raise ValueError(f"{self.where(shard)}: a flat file of tokens without .idx. Pass dtype=, their type")
        return layout

    def _entry(self, shard: int, tolerant: bool) -> ShardEntry:
        """Return the entry with the number of samples for these settings.

        Raises `ShardError` unless `tolerant`, ValueError.
        """
        entry, layout = self.entries[shard], self._layouts[shard]
        if entry.fault:
            return entry
        header_fault = self._header_fault(shard) if layout.layout_kind == FLAT and self._is_array(shard) else ""
        fault = header_fault or (self._cut_fault(shard) if layout.layout_kind == FLAT else "")
        if fault:
            if not tolerant:
                raise ShardError(f"{self.where(shard)}: {fault}")
            log.warning("%s: %s. Only the samples before it are used", self.where(shard), fault)
            entry = msgspec.structs.replace(entry, fault=encodable(f"{entry.name}: {fault}"))
            if header_fault:
                return entry
        if self.length is not None:
            assert self.stride is not None
            return msgspec.structs.replace(entry, samples=max(0, (layout.tokens - self.length) // self.stride + 1))
        if layout.layout_kind == FLAT or (layout.layout_kind == ARRAY and not layout.row_tokens):
            raise ValueError(f"{self.where(shard)}: a flat file of tokens has no documents. Pass length= of windows")
        return entry

    def _is_array(self, shard: int) -> bool:
        return self.entries.names[shard].lower().endswith(".npy")

    def _header_fault(self, shard: int) -> str:
        """Return why an array without a header is not read as bare numbers, or ""."""
        if not self._layouts[shard].dtype:
            return "no header of NumPy: it is damaged, or has bare numbers, as OLMo-core writes them. Pass dtype="
        if any(layout.layout_kind == ARRAY for layout in self._layouts):
            return "no header of NumPy, where other files have one: it is damaged, copy it again; or read it by itself"
        return ""

    def _cut_fault(self, shard: int) -> str:
        """Return the fault of a flat file that ends within a token, or ""."""
        size, dtype = self.entries[shard].size, self._layouts[shard].dtype
        if size % np.dtype(dtype).itemsize:
            return f"{size} bytes are no whole number of {dtype}. Copy it again, or pass the right dtype="
        return ""

    def _extent(self, shard: int, row: int) -> tuple[int, int]:
        """Return offset and size in bytes of a sample. Raises `ShardError` for an invalid index."""
        layout = self._layouts[shard]
        if shard not in self._checked:
            self._check_file(shard)
        width = np.dtype(layout.dtype).itemsize
        if self.length is not None:
            assert self.stride is not None
            return layout.begin + row * self.stride * width, self.length * width
        if layout.layout_kind == ARRAY:
            return layout.begin + row * layout.row_tokens * width, layout.row_tokens * width
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

    def _check_file(self, shard: int) -> None:
        """Raise `ShardError` unless the file and its `.idx` are as indexed."""
        where, file = self.where(shard), self.file(shard)
        try:
            idx = idx_of(file) if self._layouts[shard].layout_kind == INDEXED and self.length is None else None
            if idx is not None:
                self.files.watch_view(~shard, idx)
                if digest_of(file) != self.entries.digests[shard]:
                    raise ShardError(
                        f"{where}: it or its .idx was rewritten after indexing. Start again, or restore the old file",
                        reason="changed shard",
                    )
                self._documents[shard] = with_handles(lambda: with_retries(idx, partial(read_documents, idx)))
        except TokenFileError as error:
            raise self.damaged(shard, "index", str(error)) from error
        except OSError as error:
            raise unreadable_error(error.filename or where, error) from error
        self._checked.add(shard)


def check_token_settings(length: int | None, stride: int | None, dtype: str | None) -> None:
    """Raise ValueError for a wrong setting of a `TokenStore`."""
    for name, value in [("length", length), ("stride", stride)]:
        if value is not None and value < 1:
            raise ValueError(f"TokenReader: {name} must be at least 1, not {value}")
    if stride is not None and length is None:
        raise ValueError("TokenReader: stride= needs length=, the tokens of a window")
    if dtype is not None and dtype not in (names := TYPES[1:]):  # without number 0, which is no type
        raise ValueError(f"TokenReader: dtype must be one of {', '.join(names)}, not {dtype!r}")


TOKENS = Format(
    "tokens",
    (".bin", ".npy"),
    read_token_table,
    TokenStore,
    ("length", "stride", "dtype"),
    {"documents_or": 1024},
    is_same=tokens_match_index,
    no_rows=_NO_LAYOUT,
    sidecar=(".bin", _IDX),
)
