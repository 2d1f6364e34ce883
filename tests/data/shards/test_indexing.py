"""The index of a folder of shards: how it is made, found and written, shard by shard."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import multiprocessing
import os
import resource
import shutil
import tarfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from savable_pipeline.core import files
from savable_pipeline.data.shards import index_making, indexing
from savable_pipeline.data.shards.index import Format, ShardTable
from savable_pipeline.data.shards.index_making import ScannedTables, write_index
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.shards.tar_format import LayoutParts, TarColumns, TarIndex
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import ShardError
from tests.conftest import write_tar


def write_pax(path: Path, members: list[tuple[str, bytes]]) -> None:
    """A PAX tar; names over 100 characters get headers of their own."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


def open_index(root: Path, names: list[str], *, tolerant: bool = False) -> TarIndex:
    """The index of these tars."""
    found = indexing.open_index(root, names, TARS, tolerant=tolerant).index
    assert isinstance(found, TarIndex)
    return found


def contents(root: Path, index: TarIndex) -> dict[str, list[dict[str, bytes]]]:
    """Every part of every sample by shard, read at the places that the index gives."""
    found: dict[str, list[dict[str, bytes]]] = {}
    for number, name in enumerate(index.shards.names):
        raw = (root / name).read_bytes()
        found[name] = []
        for row in index.rows_of(number):
            layout = index.layout(row)
            places = {e: index.extent(row, member, layout) for e, member in layout.member_of.items()}
            found[name].append({e: raw[offset : offset + size] for e, (offset, size) in places.items()})
    return found


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Path, dict[str, list[dict[str, bytes]]]]:
    """Shards with samples of other lengths and layouts, PAX headers between, and an empty one; and what they hold."""
    long = "folder/" + "n" * 150
    expected = {
        "a.tar": [{"txt": b"one", "json": b"{}"}, {"txt": b"x" * 512, "json": b""}],
        "b.tar": [],
        "c.tar": [{"jpg": b"y" * 513}, {"txt": b"two", "json": b"[]", "jpg": b"z"}, {"json": b"3", "txt": b"4"}],
        "d.tar": [{"txt": b"long", "json": b"name"}],
    }
    for name, samples in expected.items():
        keys = [long if name == "d.tar" else f"k{i}" for i in range(len(samples))]
        members = [(f"{key}.{e}", data) for key, parts in zip(keys, samples, strict=True) for e, data in parts.items()]
        (write_pax if name == "d.tar" else write_tar)(tmp_path / "shards" / name, members)
    return tmp_path / "shards", expected


NAMES = ["a.tar", "b.tar", "c.tar", "d.tar"]


def test_every_part_is_at_its_indexed_offset(mixed: Any) -> None:
    root, expected = mixed
    assert contents(root, open_index(root, NAMES)) == expected
    assert contents(root, TarIndex(root / INDEX_NAME)) == expected  # again, from the file


def test_uniform_shards_need_no_layouts_and_no_firsts(make_shards: Any) -> None:
    root = make_shards([3, 0, 2])
    index = open_index(root, ["0000.tar", "0001.tar", "0002.tar"])
    assert (len(index.layouts), index.members, len(index.layout_of), len(index.firsts)) == (1, 1, 0, 0)
    assert [entry.samples for entry in index.shards] == [3, 0, 2]
    assert contents(root, index)["0002.tar"] == [{"json": b'{"id": 3}'}, {"json": b'{"id": 4}'}]


def test_a_member_over_four_gigabytes_has_its_size_in_eight_bytes(tmp_path: Path) -> None:
    size = 2**32 + 5
    info = tarfile.TarInfo("a.bin")
    info.size = size
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(512 + size + 507 + 1024)  # a hole, which takes no space
    index = open_index(tmp_path, ["a.tar"])
    assert index.extent(0, 0, index.layout(0)) == (512, size)


ODD_ENDS = [
    [("k0.txt", b"1"), ("k1.txt", b"2"), ("README", b"not a sample")],
    [("README", b"not a sample")],
    [("__meta__/x.json", b"{}"), ("k0.txt", b"1"), ("k0.json", b"{}"), ("__meta__/y.json", b"{}")],
    [],
]


def test_the_offsets_file_equals_megatron_energons_byte_for_byte(mixed: Any) -> None:
    pytest.importorskip("megatron.energon")
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    root, _ = mixed
    for number, members in enumerate(ODD_ENDS):
        write_tar(root / f"odd{number}.tar", members)
    info = tarfile.TarInfo("folder.d/")
    info.type = tarfile.DIRTYPE
    with tarfile.open(root / "odd0.tar", "a") as tar:
        tar.addfile(info)
    names = sorted(path.name for path in root.glob("*.tar"))
    index_files(root, TARS, processes=1)
    for name in names:
        ours = (root / name).with_suffix(".tar.idx").read_bytes()
        list(WebdatasetPreparator._preprocess_tar(name, {name: 0}, EPath(str(root)), 10))
        assert (root / name).with_suffix(".tar.idx").read_bytes() == ours, name


def test_offsets_file_has_the_start_of_each_sample_and_the_end(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a.txt", b"1"), ("a.json", b"2"), ("b.txt", b"x" * 600)])
    index_files(tmp_path, TARS, processes=1)
    raw = (tmp_path / "a.tar.idx").read_bytes()
    assert [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)] == [0, 2048, 3584]


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the shards that are scanned during the test."""
    names: list[str] = []

    scan = Format.scan

    def counting(form: Format, root: Path, name: str) -> Any:
        names.append(name)
        return scan(form, root, name)

    monkeypatch.setattr(Format, "scan", counting)
    return names


def test_only_new_and_rewritten_shards_are_scanned(mixed: Any, scanned: list[str]) -> None:
    root, expected = mixed
    open_index(root, NAMES)
    assert sorted(scanned) == NAMES
    scanned.clear()
    assert contents(root, open_index(root, NAMES)) == expected
    assert scanned == []

    write_tar(root / "e.tar", [("k.txt", b"new")])
    index = open_index(root, [*NAMES, "e.tar"])
    assert scanned == ["e.tar"]
    assert contents(root, index) == {**expected, "e.tar": [{"txt": b"new"}]}

    scanned.clear()
    write_tar(root / "c.tar", [("k.txt", b"rewritten"), ("l.txt", b"x" * 20_000)])
    (root / "a.tar").unlink()
    index = open_index(root, ["b.tar", "c.tar", "d.tar", "e.tar"])
    assert scanned == ["c.tar"]
    assert list(index.shards.names) == ["b.tar", "c.tar", "d.tar", "e.tar"]
    assert contents(root, index)["c.tar"] == [{"txt": b"rewritten"}, {"txt": b"x" * 20_000}]
    assert contents(root, index)["d.tar"] == expected["d.tar"]


def test_subset_uses_the_full_index_without_changing_it(mixed: Any, scanned: list[str]) -> None:
    root, _ = mixed
    open_index(root, ["a.tar"])
    open_index(root, ["c.tar"])
    assert scanned == ["a.tar", "c.tar"]
    open_index(root, ["a.tar", "c.tar"])
    assert scanned == ["a.tar", "c.tar"]


def test_a_moved_or_copied_dataset_needs_no_new_index(mixed: Any, tmp_path: Path, scanned: list[str]) -> None:
    root, expected = mixed
    open_index(root, NAMES)
    scanned.clear()
    shutil.copytree(root, tmp_path / "elsewhere")
    assert contents(tmp_path / "elsewhere", open_index(tmp_path / "elsewhere", NAMES)) == expected
    assert scanned == []


def test_damaged_or_truncated_index_is_detected_before_use(mixed: Any) -> None:
    """The header's when it is opened, a row's when its shard is."""
    root, expected = mixed
    open_index(root, NAMES)
    path = root / INDEX_NAME
    whole = path.read_bytes()
    rows = len(whole) - sum(a.nbytes + -a.nbytes % 8 for a in arrays_of(TarIndex(path)))
    for position in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[position] ^= 0x10
        path.write_bytes(flipped)
        if position < rows:
            with pytest.raises(ShardError):
                TarIndex(path)
        elif flipped[position] != 0x10:  # not in the padding between two arrays
            index = TarIndex(path)
            damaged = [number for number in range(len(NAMES)) if not index.is_whole(number)]
            assert damaged or contents(root, index) == expected
        if position:
            path.write_bytes(whole[:position])
            with pytest.raises(ShardError):
                TarIndex(path)


def arrays_of(index: TarIndex) -> list[memoryview]:
    return [index.starts, index.layout_of, index.firsts, index.sizes]


def test_damaged_index_is_rebuilt(mixed: Any, caplog: Any) -> None:
    root, expected = mixed
    open_index(root, NAMES)
    path = root / INDEX_NAME
    whole = path.read_bytes()
    for damaged in (b"", b"SAVIDX04", whole[:-8], whole + bytes(8), whole[:30] + b"?" + whole[31:]):
        path.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert contents(root, open_index(root, NAMES)) == expected
        assert path.read_bytes() == whole
    assert "It is rebuilt" in caplog.text


def _open_and_report(root: Path, trace: Path, together: Any, found: Any) -> None:
    """Open the index when all processes are ready; scanning is slow, scans and writes are written down."""

    scan = Format.scan

    def slow_scan(form: Format, root: Path, name: str) -> Any:
        time.sleep(0.1)
        _note(trace, name)
        return scan(form, root, name)

    def noted_write(path: Path, tables: Any, form: Format) -> None:
        _note(trace, "index")
        write_index(path, tables, form)

    Format.scan, index_making.write_index = slow_scan, noted_write  # type: ignore[method-assign]
    together.wait(30)
    found.put(contents(root, open_index(root, NAMES)))


def _note(trace: Path, what: str) -> None:
    with trace.open("a") as file:
        file.write(f"{what}\n")


def test_one_of_several_concurrent_processes_builds_the_index(mixed: Any, tmp_path: Path) -> None:
    root, expected = mixed
    context = multiprocessing.get_context("fork")
    found, together = context.Queue(), context.Barrier(5)
    arguments = (root, tmp_path / "trace", together, found)
    processes = [context.Process(target=_open_and_report, args=arguments) for _ in range(5)]
    for process in processes:
        process.start()
    assert [found.get(timeout=30) for _ in processes] == [expected] * 5
    for process in processes:
        process.join(30)
    assert sorted((tmp_path / "trace").read_text().split()) == [*NAMES, "index"]
    assert not list(root.glob("**/*.tmp"))


def test_indexes_of_read_only_folders_are_in_the_cache(
    mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scanned: list[str]
) -> None:
    root, expected = mixed
    cache = tmp_path / "cache"
    (root / ".nv-meta").write_bytes(b"in the way of a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert contents(root, open_index(root, NAMES)) == expected
    write_tar(tmp_path / "other" / "a.tar", [("k.txt", b"another")])
    (tmp_path / "other" / ".nv-meta").touch()
    index = open_index(tmp_path / "other", ["a.tar"])
    assert contents(tmp_path / "other", index) == {"a.tar": [{"txt": b"another"}]}
    assert len(list(cache.glob("savable_pipeline/*.index"))) == 2
    scanned.clear()
    assert contents(root, open_index(root, NAMES)) == expected
    assert scanned == []
    shutil.rmtree(cache)
    cache.write_bytes(b"in the way too")
    with pytest.raises(ShardError, match="no place to write an index"):
        open_index(root, NAMES)


def test_unreadable_shard_is_an_error_until_it_is_repaired(mixed: Any, scanned: list[str]) -> None:
    root, expected = mixed
    whole = (root / "c.tar").read_bytes()
    (root / "c.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(ShardError, match=r"c\.tar: no tar header at byte 0"):
        open_index(root, NAMES)
    with pytest.raises(ShardError, match=r"z\.tar: No such file"):
        open_index(root, ["z.tar"])
    scanned.clear()
    (root / "c.tar").write_bytes(whole)
    assert contents(root, open_index(root, NAMES))["c.tar"] == expected["c.tar"]
    assert scanned == ["c.tar"]


def test_tolerant_index_has_the_samples_before_the_damage(mixed: Any) -> None:
    root, expected = mixed
    os.truncate(root / "c.tar", 4096)  # within the second sample
    index = open_index(root, [*NAMES, "z.tar"], tolerant=True)
    (root / "z.tar").touch()
    assert contents(root, index)["c.tar"] == expected["c.tar"][:1]
    entries = {entry.name: entry for entry in index.shards}
    assert (entries["z.tar"].samples, entries["z.tar"].fault) == (0, "z.tar: No such file or directory")
    assert entries["c.tar"].fault.startswith("c.tar: truncated: the member at byte")


def test_tolerant_index_keeps_entries_of_changed_and_deleted_shards(mixed: Any, scanned: list[str]) -> None:
    root, _ = mixed
    before = open_index(root, NAMES).shards
    write_tar(root / "a.tar", [("other.txt", b"x" * 5000)])
    (root / "c.tar").unlink()
    write_tar(root / "e.tar", [("k.txt", b"new")])
    scanned.clear()
    names = [*NAMES, "e.tar"]
    assert [entry for entry in open_index(root, names, tolerant=True).shards if entry.name != "e.tar"] == before
    assert scanned == ["e.tar"]
    (root / "e.tar").unlink()
    path, faults = index_files([root / name for name in ("a.tar", "b.tar", "d.tar")], TARS)
    assert {e.name: e.samples for e in TarIndex(path).shards} == {"a.tar": 1, "b.tar": 0, "d.tar": 1}
    assert not faults


def test_several_processes_build_the_same_index_as_one(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = mixed
    (root / "c.tar").write_bytes(b"no tar" * 1000)
    told: list[tuple[int, int]] = []
    path, faults = index_files(root, TARS, processes=1, progress=lambda *numbers: told.append(numbers))
    assert [(entry.name, entry.samples) for entry in faults] == [("c.tar", 0)]
    assert told == [(done, 4) for done in range(5)]
    alone = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(index_making, "_ALONE_S", -1.0)
    index_files(root, TARS, processes=2)
    assert path.read_bytes() == alone


def test_interrupted_indexing_resumes(mixed: Any, scanned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root, expected = mixed

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_files(root, TARS, processes=1, progress=stop)
    assert scanned == NAMES[:3]
    scanned.clear()
    assert contents(root, open_index(root, NAMES)) == expected
    assert scanned == NAMES[3:]


def test_indexing_interrupted_before_an_offsets_file_writes_it_on_resume(
    mixed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    root, _ = mixed
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("savable_pipeline.data.shards.tar_format.replace_file", stop)
        index_files(root, TARS, processes=1)
    index_files(root, TARS, processes=1)
    assert [name for name in NAMES if not (root / f"{name}.idx").exists()] == []


def test_newer_offsets_of_another_program_are_not_overwritten(mixed: Any, caplog: Any) -> None:
    root, _ = mixed
    (root / "a.tar.idx").write_bytes(bytes(8))
    (root / "c.tar.idx").write_bytes(bytes(8))
    os.utime(root / "c.tar.idx", (1, 1))  # older than the shard
    index_files(root, TARS, processes=1)
    assert (root / "a.tar.idx").read_bytes() == bytes(8)
    assert len((root / "c.tar.idx").read_bytes()) == 32
    assert "a.tar.idx: not the offsets" in caplog.text


def test_hash_of_a_shard_depends_on_names_and_offsets_not_on_contents(tmp_path: Path) -> None:
    def digest(members: list[tuple[str, bytes]]) -> int:
        write_tar(tmp_path / "a.tar", members)
        return TARS.scan(tmp_path, "a.tar").entry.digest

    plain = digest([("a.txt", b"1"), ("b.txt", b"2")])
    assert digest([("a.txt", b"x"), ("b.txt", b"y")]) == plain
    assert digest([("a.txt", b"1"), ("c.txt", b"2")]) != plain
    assert digest([("a.txt", b"12"), ("b.txt", b"2")]) != plain
    assert digest([("b.txt", b"2"), ("a.txt", b"1")]) != plain


def test_names_that_are_not_utf8_are_read_and_such_extensions_rejected(tmp_path: Path) -> None:
    for name, extension in [("ok.tar", "txt"), ("bad.tar", "tx\udce9")]:
        with tarfile.open(tmp_path / name, "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
            tar.addfile(tarfile.TarInfo(f"caf\udce9.{extension}"))
    assert TARS.scan(tmp_path, "ok.tar").entry.samples == 1
    assert len(open_index(tmp_path, ["ok.tar"]).shards) == 1
    with pytest.raises(ShardError, match=r"bad\.tar: .*UTF-8"):
        open_index(tmp_path, ["bad.tar"])


def test_shard_whose_file_name_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.tar")
    write_tar(tmp_path / name, [("a.txt", b"")])
    with pytest.raises(ShardError, match="UTF-8"):
        open_index(tmp_path, [name])


def test_a_url_is_an_error_that_says_how_it_is_indexed() -> None:
    with pytest.raises(ShardError, match=r"s3://b/x\.tar: expected files, not a URL\. .*`savable index s3://b/x\.tar`"):
        index_files("s3://b/x.tar", TARS)


def full_below(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Disks that are full: a file there can be begun, and no byte of it written."""

    @contextlib.contextmanager
    def replacing(path: Path, **settings: Any) -> Any:
        with files.replacing(path, **settings) as file:
            if any(folder in path.parents for folder in folders):
                raise OSError(errno.ENOSPC, "No space left on device")
            yield file

    def replace(path: Path, parts: Any, **settings: Any) -> None:
        with replacing(path, **settings) as file:
            file.writelines(parts)

    monkeypatch.setattr("savable_pipeline.data.shards.index_making.replacing", replacing)
    monkeypatch.setattr("savable_pipeline.data.shards.tar_format.replace_file", replace)


def test_index_is_in_the_users_cache_if_the_datasets_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_tar(tmp_path / "data/a.tar", [("k.txt", b"x")])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    full_below(monkeypatch, tmp_path / "data")
    assert open_index(tmp_path / "data", ["a.tar"]).shards[0].samples == 1
    assert "No space left on device; the index cannot be written there" in caplog.text
    assert len(list((tmp_path / "cache").rglob("*.index"))) == 1
    assert not [*tmp_path.rglob("*.tmp"), *tmp_path.rglob("*.scanned")]
    full_below(monkeypatch, tmp_path)
    write_tar(tmp_path / "data/b.tar", [("k.txt", b"x")])
    with pytest.raises(ShardError, match=r"no place to write an index: .*No space left.*; .*No space left"):
        open_index(tmp_path / "data", ["a.tar", "b.tar"])
    assert not list(tmp_path.rglob("*.tmp"))


def test_user_without_a_home_indexes_next_to_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"x")])
    monkeypatch.setattr("savable_pipeline.data.shards.indexing.user_cache", lambda: None)
    assert open_index(tmp_path, ["a.tar"]).shards[0].samples == 1
    (tmp_path / INDEX_NAME).unlink()
    full_below(monkeypatch, tmp_path)
    with pytest.raises(ShardError, match=r"This user has no home folder\. Free space, or set XDG_CACHE_HOME"):
        open_index(tmp_path, ["a.tar"])


ONE: list[LayoutParts] = [(("txt", 1),)]
TWO: list[LayoutParts] = [(("txt", 1),), (("a", 1), ("b", 3))]


def table(name: str, layouts: list[LayoutParts], samples: int = 4, size: int = 7) -> ShardTable:
    layout_of = np.arange(samples, dtype="<u4") % max(1, len(layouts))
    parts = sum(len(layouts[number]) for number in layout_of.tolist())
    starts, sizes = np.arange(samples, dtype="<u8") * 512, np.full(parts, size, dtype="<u8")
    entry = ShardEntry(name, 1 << 40, samples, samples * 7919)
    return TarColumns(starts.data, 0, layouts, layout_of.data, sizes.data).table(entry)


@pytest.mark.parametrize(
    "tables",
    [
        [],
        [table("a.tar", ONE)],
        [table("a.tar", ONE), table("b.tar", [], samples=0), table("c.tar", ONE, samples=9)],
        [table("a.tar", TWO), table("b.tar", ONE), table("é/0.tar", TWO, samples=3)],
        [table("a.tar", ONE), table("b.tar", ONE, size=1 << 33)],
        [table("a.tar", TWO[1:]), table("b.tar", TWO[1:])],
    ],
)
def test_written_tables_are_read_back_equal(tmp_path: Path, tables: list[ShardTable]) -> None:
    write_index(tmp_path / "index", iter(tables), TARS)
    index = TarIndex(tmp_path / "index")
    assert [index.table(number) for number in range(len(index.shards))] == tables
    assert all(index.is_whole(number) for number in range(len(tables)))
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_shards_out_of_order_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.tar after b\.tar: an index has its shards in the order of names"):
        write_index(tmp_path / "index", [table("b.tar", ONE), table("a.tar", ONE)], TARS)
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_samples(tmp_path: Path) -> None:
    def tables() -> Iterator[ShardTable]:
        for shard in range(100):
            yield table(f"{shard:03d}.tar", ONE, samples=30_000)

    tracemalloc.start()
    write_index(tmp_path / "index", tables(), TARS)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "index").stat().st_size > 36_000_000 > 9 * most


def test_scanned_tables_survive_a_kill_during_a_write(tmp_path: Path) -> None:
    first, second = table("a.tar", ONE), table("b.tar", TWO)
    left = ScannedTables(tmp_path / "index")
    left.add(first)
    left.add(second)
    del left
    path = tmp_path / "index.scanned"
    path.write_bytes(path.read_bytes()[:-3])
    with ScannedTables(tmp_path / "index") as scanned:
        assert (list(scanned), scanned["a.tar"]) == (["a.tar"], first)
        scanned.add(second)
        assert scanned["b.tar"] == second
    assert not path.exists()


def test_index_larger_than_the_file_size_limit_is_written_elsewhere_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(tmp_path / "shards/a.tar", [("a.txt", b"")])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(ShardError, match=r"no place to write an index: .*File too large.*; .*File too large"):
            open_index(tmp_path / "shards", ["a.tar"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
