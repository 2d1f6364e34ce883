"""Files of tokens: Megatron's `.bin` with its `.idx`, flat `.npy`, and flat `.bin` of a type that is given.

    .idx   "MMIDIDX" 0 0 │ version u64 = 1 │ type u8 │ sequences u64 │ documents u64 │ lengths i32 (sequences,)
           │ pointers i64 (sequences,): bytes in the .bin │ firsts i64 (documents,): sequences, the last one the end

Places of a file in the index: what it is, the number of its type (0: to be given), the byte where tokens begin, tokens,
documents, and tokens of a row (.npy of two dimensions).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from savable_pipeline.core.open_files import is_out_of_handles
from savable_pipeline.core.wording import encodable
from savable_pipeline.shards.paths import ShardKind
from savable_pipeline.shards.shard_list import ShardEntry
from savable_pipeline.stores.file_format import FileFormat
from savable_pipeline.stores.place_index import FileTable

FLAT, INDEXED, ARRAY = 0, 1, 2
TYPES = ("", "uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16", "uint32", "uint64")
_MAGIC = b"MMIDIDX\0\0"
_HEAD = struct.Struct("<9sQBQQ")
_SEEN, _BLOCKS = 1 << 12, 64  # bytes that are compared at this many places of a file
_CHECKED = 1 << 20  # sequences that are looked at together


class TokenFileError(ValueError):
    """A file of tokens, or its `.idx`, cannot be right."""


@dataclass(frozen=True, slots=True)
class Layout:
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


def layout_of(places: NDArray[np.uint64]) -> Layout:
    """What the index says of a file."""
    what, kind, begin, tokens, documents, row = places.tolist()
    return Layout(what, TYPES[kind], begin, tokens, documents, row)


def idx_of(path: Path) -> Path:
    """The `.idx` of a `.bin`."""
    return path.with_suffix(".idx")


def scan(root: Path, name: str) -> FileTable:
    """Entry and layout of a file; damage is the entry's fault."""
    path, size = root / name, 0
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            places = _places(path, file, size)
            entry = ShardEntry(name, size, max(places[4], 0), digest_of(path, file.fileno()))
            return FileTable(entry, np.array(places, "<u8").tobytes())
    except OSError as error:
        if is_out_of_handles(error):
            raise
        fault = error.strerror or str(error)
    except TokenFileError as error:
        fault = str(error)
    return FileTable(ShardEntry(name, size, 0, 0, encodable(f"{name}: {fault}")), np.zeros(6, "<u8").tobytes())


def digest_of(path: Path, descriptor: int) -> int:
    """A hash of the file's size and of some of its bytes, and of its `.idx` if it has one."""
    digest = xxh3_64()
    _update(digest, descriptor)
    if path.suffix == ".bin" and idx_of(path).exists():
        with idx_of(path).open("rb") as file:
            _update(digest, file.fileno())
    return digest.intdigest()


def read_documents(path: Path, size: int) -> Documents:
    """The `.idx` of the `.bin` at `path`, which has `size` bytes. Raises `TokenFileError`, OSError."""
    idx = idx_of(path)
    with idx.open("rb") as file:
        head = file.read(_HEAD.size)
        idx_size = os.fstat(file.fileno()).st_size
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


def is_as_indexed(descriptor: int, table: FileTable) -> bool:
    """Whether a file has the first bytes that it had. (The store compares the rest, where it knows the path.)"""
    return os.fstat(descriptor).st_size == table.entry.size


def _update(digest: Any, descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    digest.update(str(size).encode())
    for block in range(_BLOCKS + 1):
        digest.update(os.pread(descriptor, _SEEN, max(0, size - _SEEN) * block // _BLOCKS))


def _places(path: Path, file: BinaryIO, size: int) -> list[int]:
    if path.suffix == ".npy":
        return _of_array(path, file, size)
    if not idx_of(path).exists():
        return [FLAT, 0, 0, 0, 0, 0]
    found = read_documents(path, size)
    _check(path, found, size)
    width = np.dtype(found.dtype).itemsize
    return [INDEXED, TYPES.index(found.dtype), 0, size // width, max(0, len(found.firsts) - 1), 0]


def _of_array(path: Path, file: BinaryIO, size: int) -> list[int]:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, EOFError, SyntaxError, TypeError) as error:
        raise TokenFileError(f"no .npy file, or its header is damaged: {error}; write it again") from error
    if dtype.name not in TYPES or dtype.newbyteorder("<") != dtype or len(shape) not in (1, 2) or fortran:
        raise TokenFileError(f"an array of type {dtype} and shape {shape}; tokens are little-endian numbers, in rows")
    tokens, begin = int(np.prod(shape, dtype=object)), file.tell()
    if begin + tokens * dtype.itemsize != size:
        raise TokenFileError(f"{size} bytes, but its header says {begin + tokens * dtype.itemsize}; copy it again")
    rows, row = (shape[0], shape[1]) if len(shape) == 2 else (0, 0)
    return [ARRAY, TYPES.index(dtype.name), begin, tokens, rows, row]


def _check(path: Path, found: Documents, size: int) -> None:
    """Raises `TokenFileError` unless sequences lie end to end in the `.bin`, and documents are made of all of them."""
    idx, width, end = idx_of(path).name, np.dtype(found.dtype).itemsize, 0
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


TOKENS = FileFormat("tokens", ShardKind((".bin", ".npy")), "savable_pipeline.stores.token_file:scan", is_as_indexed)
