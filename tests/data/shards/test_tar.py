"""Our parser of tars, with Python's `tarfile` and webdataset as judges."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

import savable_pipeline as sp
from savable_pipeline.data.shards.tar import BLOCK, members, padded, samples, split_name
from savable_pipeline.errors import ShardError
from tests.conftest import write_tar

Grouped = list[tuple[str, list[tuple[str, bytes]]]]  # per sample: key, and extension and bytes of each part


def parse(path: Path) -> Grouped:
    """What our parser finds, each payload read where it says."""
    fd = os.open(path, os.O_RDONLY)
    try:
        found = list(samples(str(path), fd))
        payloads = [[os.pread(fd, member.size, member.payload) for member in sample.members] for sample in found]
        return [(s.key, list(zip(s.extensions, data, strict=True))) for s, data in zip(found, payloads, strict=True)]
    finally:
        os.close(fd)


def judged(path: Path) -> Grouped:
    """What Python's tarfile finds."""
    grouped: Grouped = []
    with tarfile.open(path) as tar:
        for member in tar:
            parts = split_name(member.name) if member.isreg() else None
            if parts is None:
                continue
            if not grouped or grouped[-1][0] != parts[0]:
                grouped.append((parts[0], []))
            file = tar.extractfile(member)
            assert file is not None
            grouped[-1][1].append((parts[1], file.read()))
    return grouped


def header(name: bytes, size: bytes, kind: bytes = b"0", magic: bytes = b"ustar\x0000") -> bytes:
    """A header block with these very fields and a right checksum."""
    block = bytearray(BLOCK)
    block[: len(name)] = name
    block[124 : 124 + len(size)] = size
    block[156:157] = kind
    block[257 : 257 + len(magic)] = magic
    return with_checksum(block)


def with_checksum(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pad(payload: bytes) -> bytes:
    return payload + bytes(-len(payload) % BLOCK)


def extended(kind: bytes, payload: bytes) -> bytes:
    """An extended header: PAX ("x", "g") or GNU long name ("L")."""
    return header(b"extended", b"%011o\0" % len(payload), kind) + pad(payload)


def record(name: bytes, value: bytes) -> bytes:
    """A PAX record, `length name=value`."""
    length = len(name) + len(value) + 3
    while len(b"%d" % length) + len(name) + len(value) + 3 != length:
        length = len(b"%d" % length) + len(name) + len(value) + 3
    return b"%d %s=%s\n" % (length, name, value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jpg", ("a", "jpg")),
        ("a/b.c.d.jpg", ("a/b", "c.d.jpg")),
        ("v1.0/b.jpg", ("v1.0/b", "jpg")),
        ("a.JPG", ("a", "JPG")),
        ("./a/b.jpg", ("./a/b", "jpg")),
        ("a.", ("a", "")),
        ("__a.jpg", ("__a", "jpg")),
        ("__a__b.jpg", ("__a__b", "jpg")),
        ("a b\n.jpg", ("a b\n", "jpg")),
        ("no_extension", None),
        ("folder.d/no_extension", None),
        (".hidden", None),
        ("folder/.hidden.jpg", ("folder/", "hidden.jpg")),  # as in webdataset and Energon
        ("folder/._a.jpg", None),  # of macOS, a sample `folder/` in webdataset
        ("./.hidden", None),
        ("__meta__", None),
        ("__meta__/a.jpg", None),
        ("./__meta__/a.jpg", ("./__meta__/a", "jpg")),
        ("", None),
    ],
)
def test_a_name_is_cut_at_the_first_dot_of_its_last_part(name: str, expected: tuple[str, str] | None) -> None:
    assert split_name(name) == expected


COMPONENT = st.text(st.sampled_from("ab.é日 -"), min_size=1, max_size=12)
LONG = st.builds(lambda head, n: head + "x" * n, COMPONENT, st.sampled_from([90, 100, 101, 155, 256, 300]))
FOLDERS = st.lists(st.one_of(COMPONENT, LONG, st.just("__m__")), max_size=2)
NAMES = st.builds(lambda parts, last: "/".join([*parts, last]), FOLDERS, st.one_of(COMPONENT, LONG))
KINDS = st.sampled_from([tarfile.REGTYPE] * 6 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
MEMBERS = st.lists(
    st.tuples(st.sampled_from(["", "", "./"]), NAMES, KINDS, st.binary(max_size=1100)),
    max_size=8,
    unique_by=lambda member: member[1],
)


def written(path: Path, entries: list[tuple[str, str, bytes, bytes]], format: int) -> None:
    """Write a tar of any kinds of members; what the format cannot hold is left out."""
    with tarfile.open(path, "w", format=format, encoding="utf-8") as tar:
        for prefix, name, kind, payload in entries:
            info = tarfile.TarInfo(prefix + name)
            info.type = kind
            info.size = len(payload) if kind == tarfile.REGTYPE else 0
            info.linkname = "target.txt" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            try:
                tar.addfile(info, io.BytesIO(payload))
            except ValueError:  # too long a name for ustar
                continue


@settings(max_examples=settings.default.max_examples // 3)
@given(MEMBERS, st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_any_tar_is_read_like_by_tarfile(entries: list[tuple[str, str, bytes, bytes]], format: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.tar")
        written(path, entries, format)
        expected = judged(path)
        if any(len({e for e, _ in parts}) < len(parts) for _, parts in expected):
            with pytest.raises(ShardError, match="twice"):
                parse(path)
        else:
            assert parse(path) == expected


@settings(max_examples=settings.default.max_examples // 5)
@given(MEMBERS, st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_samples_are_grouped_like_by_webdataset(entries: list[tuple[str, str, bytes, bytes]], format: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.tar")
        written(path, [("", *rest) for _, *rest in entries], format)
        try:
            ours = parse(path)
        except ShardError:
            return  # the same extension twice
        with path.open("rb") as file:
            theirs = [
                (sample["__key__"], [(e, data) for e, data in sample.items() if not e.startswith("__")])
                for sample in group_by_keys(tar_file_expander([{"url": "a.tar", "stream": file}]))
            ]
        assert [(key, [(e.lower(), data) for e, data in parts]) for key, parts in ours] == theirs


@pytest.mark.skipif(not shutil.which("tar"), reason="there is no tar command")
@pytest.mark.parametrize("format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_tars_of_the_tar_command_have_the_written_samples(tmp_path: Path, format: str) -> None:
    inside = tmp_path / "in"
    names = [
        "a.json",
        "a.JPG",
        "sub.d/b.txt",
        "sub.d/no_dot",
        ".hidden",
        "__meta__/x.json",
        "é日.txt",
        "n" * 80 + ".txt",
    ]
    if format in ("oldgnu", "gnu", "posix"):
        names += ["n" * 200 + ".txt", "/".join(["d" * 90] * 4) + ".json"]
    for name in names:
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        (inside / name).write_bytes(name.encode() * 40)
    (inside / "link.txt").symlink_to("a.json")
    os.link(inside / "a.json", inside / "z-hard.json")
    path = tmp_path / "a.tar"
    subprocess.run(["tar", f"--format={format}", "--sort=name", "-cf", path, "-C", inside, "."], check=True)
    assert parse(path) == judged(path)
    # As webdataset has it, "./" is a part of the key, and "./__meta__" is no metadata.
    expected = {f"./{name}": name.encode() * 40 for name in names if name not in ("sub.d/no_dot", ".hidden")}
    assert {f"{key}.{extension}": data for key, parts in parse(path) for extension, data in parts} == expected


HELLO = header(b"a.txt", b"%011o\0" % 5) + pad(b"hello")
EMPTY = b"%011o\0" % 0
A = ("a", [("txt", b"hello")])
ODD: dict[str, tuple[bytes, Grouped]] = {
    "v7: a folder is a file with a slash, whose size means nothing": (
        header(b"dir.d/", b"%011o\0" % 5, b"\0", b"") + header(b"a.txt", b"%011o\0" % 5, b"\0", b"") + pad(b"hello"),
        [A],
    ),
    **{
        f"links and folders have no payload: {kind!r}": (header(b"x.json", b"%011o\0" % 700, kind) + HELLO, [A])
        for kind in (b"1", b"2", b"3", b"4", b"5", b"6")
    },
    "the size in a PAX header is of the member, not of a header between": (
        extended(b"x", record(b"size", b"5"))
        + extended(b"L", b"n" * 120 + b".txt\0")
        + header(b"short", EMPTY)
        + pad(b"hello"),
        [("n" * 120, [("txt", b"hello")])],
    ),
    "a global comment, and numbers with spaces": (
        extended(b"g", record(b"comment", b"x" * 40))
        + header(b"a.txt", b"          5 ")
        + pad(b"hello")
        + header(b"b.txt", b"000000005\0zz")
        + pad(b"world"),
        [A, ("b", [("txt", b"world")])],
    ),
    "a global header holds for what has none of its own": (
        extended(b"g", record(b"path", b"global.txt"))
        + header(b"a", EMPTY)
        + extended(b"x", record(b"path", b"own.txt"))
        + header(b"b", EMPTY),
        [("global", [("txt", b"")]), ("own", [("txt", b"")])],
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_headers_are_read_like_by_tarfile(tmp_path: Path, what: str) -> None:
    raw, expected = ODD[what]
    (tmp_path / "a.tar").write_bytes(raw + bytes(1024))
    assert parse(tmp_path / "a.tar") == expected
    if "between" not in what:  # which tarfile takes for the size of the header
        assert judged(tmp_path / "a.tar") == expected


def test_members_of_unknown_types_are_skipped_with_their_payload(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(header(b"x.json", b"%011o\0" % 3, b"Z") + pad(b"zzz") + HELLO + bytes(1024))
    assert parse(tmp_path / "a.tar") == [A]


@pytest.mark.parametrize("how", ["base-256", "pax"])
def test_member_of_more_than_8_gigabytes_is_skipped(tmp_path: Path, how: str) -> None:
    path, size = tmp_path / "a.tar", 9 * 2**30 + 7
    if how == "pax":
        first = extended(b"x", record(b"size", b"%d" % size)) + header(b"a.bin", b"%011o\0" % 0)
    else:
        first = header(b"a.bin", b"\x80" + size.to_bytes(11, "big"))
    with path.open("wb") as file:
        file.write(first)
        file.seek(padded(size), os.SEEK_CUR)  # a hole: takes no space
        file.write(header(b"a.txt", b"%011o\0" % 5) + pad(b"hello") + bytes(1024))
    with path.open("rb") as file:
        (sample,) = samples(str(path), file.fileno())
    assert sample.extensions == ["bin", "txt"]
    assert sample.members[0].size == size
    with tarfile.open(path) as tar:
        assert [m.offset_data for m in tar] == [member.payload for member in sample.members]


def test_a_header_starts_at_the_first_of_its_extended_headers(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("a.txt", "é" * 90 + ".txt"):
            tar.addfile(tarfile.TarInfo(name))
    with path.open("rb") as file:
        found = [(member.header, member.payload, member.end) for member in members(str(path), file.fileno())]
    assert found == [(0, 512, 512), (512, 2048, 2048)]  # PAX header, its record, header


def test_an_extension_twice_is_an_error_that_names_shard_and_offset(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"1"), ("k.json", b"{}"), ("k.txt", b"2")])
    with pytest.raises(ShardError, match=r"a\.tar: sample 'k' has the extension 'txt' twice.* byte 2048"):
        parse(tmp_path / "a.tar")


def test_extensions_that_differ_in_case_are_two_parts(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"1"), ("k.TXT", b"2")])
    assert parse(tmp_path / "a.tar") == [("k", [("txt", b"1"), ("TXT", b"2")])]


def test_key_repeated_after_another_starts_a_new_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"1"), ("l.txt", b"2"), ("k.txt", b"3")])
    assert [key for key, _ in parse(tmp_path / "a.tar")] == ["k", "l", "k"]


def test_members_that_are_not_parts_do_not_end_a_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"1"), ("__meta__/i.json", b"{}"), ("README", b""), ("k.json", b"2")])
    assert parse(tmp_path / "a.tar") == [("k", [("txt", b"1"), ("json", b"2")])]


def test_tar_truncated_anywhere_before_its_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, size in [("a.txt", 600), ("a.json", 0), ("é" * 60 + ".txt", 512), ("c.txt", 1)]:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(b"x" * size))
    whole = parse(path)
    with path.open("rb") as file:
        found = list(members(str(path), file.fileno()))
    end = found[-1].end
    for cut in range(end + 1024, -1, -1):
        os.truncate(path, cut)
        if cut >= end + 2 * BLOCK:
            assert parse(path) == whole
        else:
            with pytest.raises(ShardError, match=r"a\.tar: .*(truncated|ends at byte)"):
                parse(path)


def test_zeros_instead_of_a_header_are_an_error_but_padding_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    one = header(b"a.txt", b"%011o\0" % 5) + pad(b"hello")
    other = header(b"b.txt", b"%011o\0" % 5) + pad(b"world")
    path.write_bytes(one + bytes(BLOCK) + other[BLOCK:] + other + bytes(1024))
    with pytest.raises(ShardError, match=r"a\.tar: zeros at byte 1024, but 3072 bytes follow: zero-filled"):
        parse(path)
    path.write_bytes(one + bytes(1 << 16))  # records of 128 blocks
    assert parse(path) == [("a", [("txt", b"hello")])]
    path.write_bytes(one + bytes((1 << 16) + BLOCK))
    with pytest.raises(ShardError, match="but 66048 bytes follow: zero-filled"):
        parse(path)


def mixed_tar() -> bytes:
    """A small tar with PAX, GNU and plain headers."""
    return b"".join(
        [
            extended(b"x", record(b"path", b"long/a.txt") + record(b"size", b"5")),
            header(b"a", b"%011o\0" % 5) + pad(b"hello"),
            extended(b"L", b"b" * 110 + b".json\0"),
            header(b"b", b"\x80" + (3).to_bytes(11, "big")) + pad(b"abc"),
            header(b"c.txt", b"%011o\0" % 0, b"\0", b""),
            bytes(1024),
        ]
    )


def test_a_flipped_bit_in_a_header_is_an_error(tmp_path: Path) -> None:
    path, raw = tmp_path / "a.tar", mixed_tar()
    path.write_bytes(raw)
    whole = parse(path)
    fd = os.open(path, os.O_RDWR)
    for offset in (base + i for base in (0, 1024, 2048, 3072, 4096) for i in range(BLOCK)):
        os.pwrite(fd, bytes([raw[offset] ^ 1 << (offset * 5 % 8)]), offset)
        try:
            list(samples(str(path), fd))
            assert parse(path) == whole, offset
            assert offset % BLOCK in range(148, 156), offset  # a checksum with another character around it
        except ShardError as error:
            assert "a.tar" in str(error)
        os.pwrite(fd, raw[offset : offset + 1], offset)
    os.close(fd)


@settings(max_examples=settings.default.max_examples)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 511), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_forged_header_with_a_right_checksum_is_read_or_a_shard_error(edits: list[tuple[int, int, int]]) -> None:
    blocks = [bytearray(mixed_tar()[i : i + BLOCK]) for i in range(0, 5120, BLOCK)]
    for block, offset, value in edits:
        blocks[block][offset] = value
    for number in (0, 2, 4, 6, 8):
        with_checksum(blocks[number])
    check_forged(b"".join(bytes(block) for block in blocks))


def check_forged(raw: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(raw)
        file.flush()
        with contextlib.suppress(ShardError):
            parse(Path(file.name))


NUMBERS = [
    b"-0000002000\0",
    b"+0000000005\0",
    b"0000_000005\0",
    b"0o000000005\0",
    b"\xff" * 12,
    b"99999999999\0",
    b"\0" * 12,
]


@pytest.mark.parametrize("size", NUMBERS)
def test_size_that_is_not_octal_is_an_error(tmp_path: Path, size: bytes) -> None:
    path = tmp_path / "a.tar"
    plain = header(b"a.txt", b"%011o\0" % 5) + pad(b"hello")
    path.write_bytes(plain + plain.replace(b"a.txt", b"a.txt") + header(b"b.txt", size) + bytes(1024))
    if size.strip(b"\0"):
        with pytest.raises(ShardError):
            list(bounded(path))
    else:
        assert [m.size for m in bounded(path)] == [5, 5, 0]  # an empty field is 0


def bounded(path: Path) -> Iterator[object]:
    """Members, at most 100: a parser that goes in circles would give more."""
    with path.open("rb") as file:
        for i, member in enumerate(members(str(path), file.fileno())):
            assert i < 100
            yield member


BROKEN_PAX = [
    b"5 path=a",  # longer than it says, and no end of line
    b"99 path=a.txt\n",  # longer than the header
    b"x path=a.txt\n",
    b"-3 path=a.txt\n",
    b"2 \n",
    b"0 path=a.txt\n",
    b"99999999999999999999999999 path=a\n",
    record(b"size", b"-5"),
    record(b"size", b"5.0"),
    record(b"size", "²".encode()),
    record(b"size", b"9" * 5000),
    record(b"GNU.sparse.major", b"1"),
]
WRONG: list[tuple[str, bytes]] = [
    *(("", extended(b"x", block) + HELLO) for block in BROKEN_PAX),
    *(("within the headers of a member", extended(kind, record(b"path", b"a.txt"))) for kind in (b"L", b"K", b"x")),
    ("sparse", header(b"a.bin", EMPTY, b"S", b"ustar  \0")),
]


@pytest.mark.parametrize(("told", "raw"), WRONG)
def test_broken_headers_are_an_error(tmp_path: Path, told: str, raw: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(raw + bytes(1024))
    with pytest.raises(ShardError, match=rf"a\.tar.*{told}"):
        parse(tmp_path / "a.tar")


def test_an_extended_header_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        file.write(header(b"long", b"%011o\0" % 2**32, b"L"))
        file.truncate(2**33)  # so large a file there is, all holes
    with pytest.raises(ShardError, match=f"claims {2**32} bytes"):
        parse(path)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_content_is_an_error_that_says_so(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    for size in (10, 2000):
        write_tar(tmp_path / "a.tar", [("a.txt", os.urandom(size))])
        (tmp_path / "a.tar").write_bytes(compress((tmp_path / "a.tar").read_bytes()))
        with pytest.raises(ShardError, match=r"a\.tar: a compressed tar cannot be read .* Re-pack it"):
            parse(tmp_path / "a.tar")


@settings(max_examples=settings.default.max_examples // 3)
@given(st.binary(max_size=2000))
def test_any_bytes_are_a_tar_or_a_shard_error(raw: bytes) -> None:
    check_forged(raw)


def test_a_tar_without_members_has_no_samples_and_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(bytes(10240))
    assert parse(tmp_path / "a.tar") == []
    (tmp_path / "b.tar").touch()
    with pytest.raises(ShardError, match=r"b\.tar: truncated: it ends at byte 0"):
        parse(tmp_path / "b.tar")


def test_members_that_macos_adds_are_no_samples(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name in ("d/._a.jpg", "d/a.jpg", "d/._a.txt", "d/a.txt", "__MACOSX/d/._a.jpg", "d.v1/b.txt"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    assert [(sample.key, list(sample)) for sample in sp.open_dataset(tmp_path / "0.tar")] == [
        ("d/a", ["jpg", "txt"]),
        ("d.v1/b", ["txt"]),
    ]
