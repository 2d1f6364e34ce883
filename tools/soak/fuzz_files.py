"""Random changes of indexes, tars and YAML files, and functions that read the results."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fuzz_values import changed, changed_bytes, encoded
from xxhash import xxh3_64_intdigest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.index import PER_SHARD, Header, aligned
from savable_pipeline.data.shards.metadata import INDEX_NAME, META, read_counts, read_field_map, read_split, split_names
from savable_pipeline.data.stores.tar_store import TARS


def write_tar(path: Path, members: list[tuple[str, bytes]], kind: int = tarfile.USTAR_FORMAT) -> None:
    """Write a tar with these members. `kind` is a format of `tarfile`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


def indexes(folder: Path, rng: random.Random, count: int) -> Iterator[Callable[[], None]]:
    """Yield functions that read the shards with a changed index."""
    shards = folder / "shards"
    sp.TarShardReader(shards, sp.Lane())
    raw = (shards / INDEX_NAME).read_bytes()
    for _ in range(count):
        yield partial(_read_with_index, shards, _changed_index(raw, rng))


def _changed_index(raw: bytes, rng: random.Random) -> bytes:
    """Change one part of an index, and correct its checksum."""
    length = int.from_bytes(raw[16:24], "little")
    known, columns = msgspec.msgpack.decode(raw[24 : 24 + length], type=Header), aligned(24 + length)
    end = aligned(columns + 8 * known.shards * PER_SHARD + known.names)
    header, shards, rows = raw[24 : 24 + length], raw[columns:end], raw[end:]
    chance = rng.random()
    if chance < 0.3:
        header = encoded(changed(msgspec.msgpack.decode(header), rng))
    elif chance < 0.5:
        header = changed_bytes(header, rng)
    elif chance < 0.75:
        shards = changed_bytes(shards, rng)
    else:
        rows = changed_bytes(rows, rng)
    length = len(header) if rng.random() < 0.95 else rng.choice([0, 7, 2**40, 2**64 - 1])
    signed = length.to_bytes(8, "little") + header
    signed += bytes(-(16 + len(signed)) % 64) + shards
    return raw[:8] + xxh3_64_intdigest(signed).to_bytes(8, "little") + signed + rows


def _read_with_index(shards: Path, raw: bytes) -> None:
    """Read the shards with this index."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "data")
        shutil.copytree(shards, root)
        (root / INDEX_NAME).write_bytes(raw)
        _read_all(root, epochs=1)


def _read_all(root: Path, **settings: Any) -> None:
    """Read every byte of every sample. Errors of shards and parts are skipped, and the last one is raised."""
    last_error: Exception | None = None
    for sample in sp.TarShardReader(root, sp.Lane(), shuffle=False, on_error="skip", **settings):
        for access in (lambda sample=sample: sample.items(), lambda sample=sample: (sample.key, repr(sample))):
            try:
                access()
            except (sp.ShardError, KeyError) as error:
                last_error = error if isinstance(error, sp.ShardError) else last_error
    if last_error is not None:
        raise last_error


def tars(folder: Path, rng: random.Random, count: int) -> Iterator[Callable[[], None]]:
    """Yield functions that read a changed tar."""
    path = folder / "long.tar"
    write_tar(path, [(f"{'d' * 120}/s{i}.json", b'{"id": 1}' * (i + 1)) for i in range(3)], tarfile.PAX_FORMAT)
    raws = [path.read_bytes(), (folder / "shards/1.tar").read_bytes()]
    for _ in range(count):
        yield partial(_read_tar, _changed_tar(bytearray(rng.choice(raws)), rng))


def _changed_tar(raw: bytearray, rng: random.Random) -> bytes:
    """Change fields of one or two headers of a tar, and correct their checksums."""
    headers = [offset for offset in range(0, len(raw), 512) if raw[offset + 257 : offset + 262] == b"ustar"]
    for _ in range(rng.randint(1, 2)):
        offset = rng.choice(headers)
        # start and length in the header of name, size, type, magic, prefix, or the data after the header
        start, width = rng.choice([(0, 100), (124, 12), (156, 1), (257, 8), (345, 155), (512, 200)])
        if rng.random() < 0.3:
            text = rng.choice([b"\xff" * 12, b"77777777777\0", b"\x80" + b"\xff" * 11, b"-1", b"99 GNU.sparse.a=1\n"])
            raw[offset + start : offset + start + min(width, len(text))] = text[:width]
        else:
            raw[offset + start + rng.randrange(width)] = rng.randrange(256)
        if rng.random() < 0.2:
            raw[offset + 156 : offset + 157] = rng.choice([b"x", b"g", b"L", b"K", b"S", b"5", b"0"])
        checksum = sum(raw[offset : offset + 512]) - sum(raw[offset + 148 : offset + 156]) + 8 * 32
        raw[offset + 148 : offset + 156] = b"%06o\0 " % checksum
    return bytes(raw[: rng.randrange(len(raw))]) if rng.random() < 0.1 else bytes(raw)


def _read_tar(raw: bytes) -> None:
    """Index and read a tar. Raises `ShardError` if it is damaged."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "data")
        root.mkdir()
        (root / "0.tar").write_bytes(raw)
        fault = TARS.scan(root, "0.tar").entry.fault
        _read_all(root, epochs=1)
        if fault:
            raise sp.ShardError(fault)


_SPLIT = "split_parts:\n  train: ['{0..1}.tar']\n  val:\n  - 2.tar\nexclude: [1.tar/s21]\n"
_INFO = "shard_counts:\n  0.tar: 20\n  1.tar: 7\n  2.tar: 30\n"
_FIELDS = "sample_type:\n  __module__: a\nfield_map:\n  text: json[id]\n  image: jpg,png\n"
_MIXTURE = (
    "sources:\n  a:\n    path: shards\n    weight: 0.7\n  b:\n    weight: 1/3\n    sources:\n"
    "      c: {path: shards, weight: 2, subset: 0.5}\n      d: {path: [shards/0.tar], weight: 1}\n"
)
_WORDS = [
    "*a", "&a ", "<<: *a", "!!int ''", "!!int 1:1:1", "!!bool x", "!!float ", "!!timestamp x", "!!binary ä",
    "!!set {a, b}", "!!omap [a: 1]", "? [a]: 1", "2001-99-99", "0x", "0b", "1:61:61", ".inf", ".nan", "1e999",
    "'1e99999999'", "~", "yes", "{", "}", "[", "]", ": ", "- ", "\n", "\t", "\x00", "\x85", "\ud800", "#", "|", ">",
    "%YAML 9.9\n---\n", "---\n", "...\n", "!!python/object:os.system x", "[" * 300, "1" * 5000, "1:" * 3000 + "1",
    "{0..999999}", "{a,b}{a,b}{a,b}", "-1", "= ", "'{0..999999}', " * 20, "sources:", "weight:", "repetitions: 2",
    "subset: [0.1, .nan]", "null", "9" * 400,
]  # fmt: skip


def yaml_files(folder: Path, rng: random.Random, count: int) -> Iterator[Callable[[], None]]:
    """Yield functions that read a changed YAML file."""
    texts = [("split.yaml", _SPLIT), (".info.yaml", _INFO), ("dataset.yaml", _FIELDS), ("mixture.yaml", _MIXTURE)]
    root = folder / "yaml"
    shutil.copytree(folder / "shards", root / "shards", dirs_exist_ok=True)
    for number in range(count):
        name, text = texts[number % len(texts)]
        raw = _changed_text(text, rng).encode("utf-8", "surrogatepass")
        if rng.random() < 0.2:
            raw = changed_bytes(raw, rng)
        yield partial(_read_yaml, root, name, raw)


def _changed_text(text: str, rng: random.Random) -> str:
    """Replace or insert one to three words of YAML."""
    for _ in range(rng.randint(1, 3)):
        words = text.replace(",", " ,").split(" ")
        index = rng.randrange(len(words))
        if rng.random() < 0.6:
            words[index] = rng.choice(_WORDS)
        else:
            words.insert(index, rng.choice(_WORDS))
        text = " ".join(words)
    return text


def _read_yaml(root: Path, name: str, raw: bytes) -> None:
    """Read a YAML file of metadata or of a mixture."""
    path = root / name if name == "mixture.yaml" else root / "shards" / META / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw)
    try:
        if name == "mixture.yaml":
            next(custom.read_mixture(path).samples(sp.Lane()))
        else:
            _read_metadata(root / "shards")
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _read_metadata(root: Path) -> None:
    read_counts(root)
    for split in split_names(root):
        read_split(root, split, {"0.tar", "1.tar", "2.tar"})
    read_field_map(root)
