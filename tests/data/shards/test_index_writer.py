"""An index is written shard by shard, in the order of names; tables that were scanned outlive who scanned them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.index_making import ScannedTables, write_index
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.shards.tar_format import TARS, LayoutParts, TarColumns, TarIndex

ONE: list[LayoutParts] = [(("txt", 1),)]
TWO: list[LayoutParts] = [(("txt", 1),), (("a", 1), ("b", 3))]


def table(name: str, layouts: list[LayoutParts], samples: int = 4, size: int = 7) -> ShardTable:
    layout_of = np.arange(samples, dtype="<u4") % max(1, len(layouts))
    parts = sum(len(layouts[number]) for number in layout_of.tolist())
    starts, sizes = np.arange(samples, dtype="<u8") * 512, np.full(parts, size, dtype="<u8")
    entry = ShardEntry(name, 1 << 40, samples, samples * 7919)
    return TarColumns(starts.tobytes(), 0, layouts, layout_of.tobytes(), sizes.tobytes()).table(entry)


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
def test_tables_come_back_as_they_were(tmp_path: Path, tables: list[ShardTable]) -> None:
    write_index(tmp_path / "index", iter(tables), TARS)
    index = TarIndex(tmp_path / "index")
    assert [index.table(number) for number in range(len(index.shards))] == tables
    assert all(index.is_whole(number) for number in range(len(tables)))
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_shards_out_of_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.tar after b\.tar: an index has its shards in the order of names"):
        write_index(tmp_path / "index", [table("b.tar", ONE), table("a.tar", ONE)], TARS)
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_samples(tmp_path: Path) -> None:
    def tables() -> Iterator[ShardTable]:
        for shard in range(100):
            yield table(f"{shard:03d}.tar", ONE, samples=50_000)

    tracemalloc.start()
    write_index(tmp_path / "index", tables(), TARS)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "index").stat().st_size > 60_000_000 > 2 * most


def test_scanned_tables_outlive_a_process_that_was_killed_while_it_wrote_one(tmp_path: Path) -> None:
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
