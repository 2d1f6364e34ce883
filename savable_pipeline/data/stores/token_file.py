"""Files of tokens: Megatron's `.bin` with its `.idx`, `.npy`, and flat `.bin` or `.npy` of a type that is given.

    .idx   "MMIDIDX" 0 0 │ version u64 = 1 │ type u8 │ sequences u64 │ documents u64 │ lengths i32 (sequences,)
           │ pointers i64 (sequences,): bytes in the .bin │ firsts i64 (documents,): sequences, the last one the end

Places of a file in the index: what it is, the number of its type (0: to be given), the byte where tokens begin, tokens,
documents, and tokens of a row (.npy of two dimensions).
"""

from __future__ import annotations

import io
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from savable_pipeline.data.shards.byte_source import ByteSource, opened
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import ShardIndex, ShardTable
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.file_kinds import TOKEN_FILES

FLAT, INDEXED, ARRAY = 0, 1, 2
_parsing = (
    threading.Lock()
)  # NumPy parses a header with `ast`, which fails in two threads at once (CPython's gh-106905)
TYPES = ("", "uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16", "uint32", "uint64")
_MAGIC = b"MMIDIDX\0\0"
_HEAD = struct.Struct("<9sQBQQ")
_IDX = ".idx"  # the suffix of what lies beside a .bin
_LONGEST_HEADER = 1 << 14  # of a .npy
_SEEN, _BLOCKS = 1 << 12, 64  # bytes that are compared at this many places of a file
_CHECKED = 1 << 20  # sequences that are looked at together


class TokenFileError(ValueError):
    """A file of tokens, or its `.idx`, cannot be right."""


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The places of a file by their meaning."""

    what: int
    dtype: str
    begin: int
    tokens: int
    documents: int
    row: int


@dataclass(frozen=True, slots=True)
class Documents:
    """The arrays of an `.idx`, memory-mapped; `firsts` are the first sequences of documents, then the end."""

    lengths: NDArray[np.int32]  # (sequences,) in tokens
    pointers: NDArray[np.int64]  # (sequences,) in bytes
    firsts: NDArray[np.int64]  # (documents + 1,)
    dtype: str


def layout_of(places: NDArray[np.uint64]) -> TokenLayout:
    """What the index says of a file."""
    what, kind, begin, tokens, documents, row = places.tolist()
    return TokenLayout(what, TYPES[kind], begin, tokens, documents, row)


def idx_of(file: ByteSource) -> Path | None:
    """The `.idx` of a `.bin`; None without one."""
    return file.beside(_IDX) if file.name.endswith(".bin") else None


def read_table(file: ByteSource, name: str) -> ShardTable:
    """Entry and layout of a file; damage is the entry's fault."""
    try:
        places = _places(file)
    except TokenFileError as error:
        return TOKENS.unreadable(name, file.size, str(error))
    return ShardTable(
        ShardEntry(name, file.size, max(places[4], 0), digest_of(file)), np.array(places, "<u8").tobytes()
    )


def digest_of(file: ByteSource) -> int:
    """A hash of the file's size and of some of its bytes, and of its `.idx` if it has one."""
    digest = xxh3_64()
    _update(digest, file)
    if (idx := idx_of(file)) is not None:
        with opened(idx) as beside:
            _update(digest, beside)
    return digest.intdigest()


def read_documents(idx: Path) -> Documents:
    """What an `.idx` says. Raises `TokenFileError`, OSError."""
    with opened(idx) as file:
        head, idx_size = file.read_at(0, _HEAD.size), file.size
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise TokenFileError(f"{idx.name} is no Megatron index; write it again, or move it away and give dtype=")
    _, version, kind, sequences, documents = _HEAD.unpack(head)
    if version != 1 or not 0 < kind < 9:
        raise TokenFileError(f"{idx.name}: version {version} and type {kind} are not known; write it again")
    needed = _HEAD.size + 12 * sequences + 8 * documents
    if idx_size not in (needed, needed + sequences):  # with a byte of mode for each sequence
        raise TokenFileError(f"{idx.name}: {idx_size} bytes, but its header says {needed}; copy it again")
    raw = np.memmap(idx, np.uint8, "r")
    ends = np.cumsum([_HEAD.size, 4 * sequences, 8 * sequences, 8 * documents]).tolist()
    arrays = [
        raw[begin:end].view(form) for begin, end, form in zip(ends, ends[1:], ("<i4", "<i8", "<i8"), strict=False)
    ]
    return Documents(arrays[0], arrays[1], arrays[2], TYPES[kind])


def is_as_indexed(file: ByteSource, index: ShardIndex, number: int) -> bool:
    """Whether a file and its `.idx` have the sizes, and in some places the bytes, that they had. Raises OSError."""
    return digest_of(file) == int(index.shards.digests[number])


def _update(digest: Any, file: ByteSource) -> None:
    size = file.size
    digest.update(str(size).encode())
    places = [(max(0, size - _SEEN) * block // _BLOCKS, _SEEN) for block in range(_BLOCKS + 1)]
    file.expect(places)
    for offset, length in places:
        digest.update(file.read_at(offset, length))


def _places(file: ByteSource) -> list[int]:
    size = file.size
    if file.name.endswith(".npy"):
        return _of_array(file, size)
    idx = idx_of(file)
    if idx is None:
        return [FLAT, 0, 0, 0, 0, 0]
    found = read_documents(idx)
    _check(idx.name, found, size)
    width = np.dtype(found.dtype).itemsize
    return [INDEXED, TYPES.index(found.dtype), 0, size // width, max(0, len(found.firsts) - 1), 0]


def _of_array(file: ByteSource, size: int) -> list[int]:
    head = io.BytesIO(file.read_at(0, min(size, _LONGEST_HEADER)))
    if not head.getvalue().startswith(np.lib.format.MAGIC_PREFIX):
        return [FLAT, 0, 0, 0, 0, 0]  # bare numbers, as OLMo-core writes them, or damage: whoever gives a type knows
    try:
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with _parsing:
            shape, fortran, dtype = read(head)
    except (ValueError, EOFError, SyntaxError, TypeError, TokenError) as error:
        raise TokenFileError(f"no .npy file, or its header is damaged: {error}; write it again") from error
    if dtype.name not in TYPES or dtype.newbyteorder("<") != dtype or len(shape) not in (1, 2) or fortran:
        raise TokenFileError(f"an array of type {dtype} and shape {shape}; tokens are little-endian numbers, in rows")
    tokens, begin = int(np.prod(shape, dtype=object)), head.tell()
    if begin + tokens * dtype.itemsize != size:
        raise TokenFileError(f"{size} bytes, but its header says {begin + tokens * dtype.itemsize}; copy it again")
    rows, row = (shape[0], shape[1]) if len(shape) == 2 else (0, 0)
    return [ARRAY, TYPES.index(dtype.name), begin, tokens, rows, row]


def _check(idx: str, found: Documents, size: int) -> None:
    """Raises `TokenFileError` unless sequences lie end to end in the `.bin`, and documents are made of all of them."""
    width, end = np.dtype(found.dtype).itemsize, 0
    for first in range(0, len(found.lengths), _CHECKED):
        lengths = found.lengths[first : first + _CHECKED].astype(np.int64)
        if int(lengths.min()) < 0:
            raise TokenFileError(f"{idx}: a sequence of {lengths.min()} tokens; write it again")
        begins = end + np.cumsum(lengths) * width - lengths * width
        wrong = np.flatnonzero(found.pointers[first : first + _CHECKED] != begins)
        if len(wrong):
            at = first + int(wrong[0])
            raise TokenFileError(
                f"{idx}: sequence {at} is said to lie at byte {found.pointers[at]}, but the ones before it end at byte "
                f"{begins[wrong[0]]}; write it again"
            )
        end = int(begins[-1] + lengths[-1] * width)
    if end != size:
        raise TokenFileError(f"{idx}: its sequences take {end} bytes, the .bin has {size}; copy both again")
    firsts = found.firsts
    if not len(firsts) or firsts[0] or firsts[-1] != len(found.lengths) or (np.diff(firsts) < 0).any():
        raise TokenFileError(f"{idx}: its documents are not made of its {len(found.lengths)} sequences; write it again")


TOKENS = FileFormat(
    "tokens",
    TOKEN_FILES,
    "savable_pipeline.data.stores.token_file:TOKENS",
    read_table,
    is_as_indexed,
    no_places=6,
    beside=(".bin", _IDX),
)
