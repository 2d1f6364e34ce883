"""Arrow IPC files as others write them: the footer says where the batches lie; one that lies is a named error."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.byte_source import opened
from savable_pipeline.data.shards.index import BlobIndex
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.stores.arrow_file import arrow_matches_index, batches_of, read_arrow_table, read_message
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.cli.main import app
from tests.support.draws import scaled_range

ROWS = 20
BLOCK = struct.Struct("<qi4xq")


def written(path: Path, compression: str | None = None) -> bytes:
    """A file by pyarrow, of four batches, with views as Polars writes texts."""
    texts = [f"text {n}, which is too long to lie inside of a view" if n % 3 else None for n in range(ROWS)]
    table = pa.table({"id": range(ROWS), "txt": pa.array(texts, pa.string_view())})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(path, table.schema, options=options) as file:
        file.write_table(table, max_chunksize=ROWS // 4)
    return path.read_bytes()


def blocks_of(path: Path) -> list[bytes]:
    """The entries of the batches in the footer of a file by pyarrow."""
    with opened(path) as file:
        batches = batches_of(np.frombuffer(read_arrow_table(file, path.name).rows, "<u8"))
        messages = [read_message(file, begin) for begin in batches.begins.tolist()]
    return [BLOCK.pack(message.offset, message.head, message.body) for message in messages]


def as_polars(path: Path, *, gap: int = 0, shuffled: bool = False, schema: bool = False) -> None:
    """Write a file of pyarrow anew: no message of the schema, gaps before batches, which lie in any order."""
    raw, blocks = path.read_bytes(), blocks_of(path)
    first = BLOCK.unpack(blocks[0])[0]
    length = struct.unpack("<i", raw[-10:-6])[0]
    footer = bytearray(raw[-10 - length : -10])
    places = {block: footer.index(block) for block in blocks}
    out = b"ARROW1\0\0" + b"\x04\0\0\0\xf2\xff\xff\xff" + bytes(48)  # a flatbuffer by itself, where a message starts
    out = raw[:first] if schema else out
    for block in random.Random(7).sample(blocks, len(blocks)) if shuffled else blocks:
        begin, head, body = BLOCK.unpack(block)
        out += b"\xaa" * gap
        BLOCK.pack_into(footer, places[block], len(out), head, body)
        out += raw[begin : begin + head + body]
    path.write_bytes(out + b"\xff\xff\xff\xff\0\0\0\0" + footer + raw[-10:])


def samples(path: Path, **settings: Any) -> list[dict[str, bytes]]:
    reader = custom.ArrowReader(str(path), sp.Lane(), shuffle=False, epochs=1, **settings)
    return [dict(sample.items()) for sample in reader]


@pytest.mark.parametrize(
    ("compression", "layout"),
    [
        (None, {}),
        ("lz4", {"gap": 24}),
        ("zstd", {"gap": 8, "shuffled": True}),
        (None, {"schema": True, "shuffled": True}),
    ],
    ids=["plain", "gaps", "shuffled", "with a schema"],
)
def test_batches_are_at_the_offsets_in_the_footer(
    tmp_path: Path, compression: str | None, layout: dict[str, Any]
) -> None:
    path = tmp_path / "a.arrow"
    written(path, compression)
    expected = samples(path)
    assert len(expected) == ROWS and expected[1]["txt"].startswith(b"text 1,") and "txt" not in expected[0]
    as_polars(path, **layout)
    assert pa.ipc.open_file(path).read_all().num_rows == ROWS
    assert samples(path) == expected
    assert samples(path, columns=["id"]) == [{"id": each["id"]} for each in expected]


def test_file_with_its_schema_in_the_footer_is_pinned(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    written(path)
    as_polars(path)
    with opened(path) as file:
        write_index(tmp_path / "index", [read_arrow_table(file, path.name)], "arrow")
        index = BlobIndex(tmp_path / "index", "arrow")
        assert arrow_matches_index(file, index, 0)
    raw = path.read_bytes()
    place = raw.rindex(b"txt")
    path.write_bytes(raw[:place] + b"TXT" + raw[place + 3 :])
    with opened(path) as file:
        assert not arrow_matches_index(file, index, 0)


def test_every_command_accepts_an_arrow_file(tmp_path: Path) -> None:
    path, target = tmp_path / "a.arrow", tmp_path / "tars"
    written(path)
    as_polars(path, gap=8)
    for command in (["info"], ["check"], ["preview", "-o", str(tmp_path / "page.html")], ["convert", str(target)]):
        name, *more = command
        result = CliRunner().invoke(app, [name, str(path), *more], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert "text 1," in (tmp_path / "page.html").read_text()
    given = {sample["txt"] for sample in sp.TarShardReader(str(target), sp.Lane(), epochs=1) if "txt" in sample}
    assert given == {each["txt"] for each in samples(path) if "txt" in each}


@pytest.mark.parametrize(
    ("begin", "told"),
    [(-8, "byte -8"), (1 << 40, "byte 1099511627776"), (0, "byte 0"), (72, "overlap"), (68, "no Arrow message")],
)
@pytest.mark.parametrize("polars", [True, False])
def test_wrong_footer_is_an_error_that_names_the_file(tmp_path: Path, begin: int, told: str, polars: bool) -> None:
    path = tmp_path / "a.arrow"
    written(path)
    if polars:
        as_polars(path)
    with opened(path) as file:
        first = int(batches_of(np.frombuffer(read_arrow_table(file, path.name).rows, "<u8")).begins[0])
    raw, last = path.read_bytes(), blocks_of(path)[-1]
    where = first + begin - 72 if begin in (72, 68) else begin
    path.write_bytes(raw.replace(last, BLOCK.pack(where, *BLOCK.unpack(last)[1:])))
    with pytest.raises(sp.ShardError, match=told) as error:
        samples(path)
    assert "a.arrow" in str(error.value) and "copy it again" in str(error.value)


def test_footer_of_any_bytes_is_read_correctly_or_rejected(tmp_path: Path) -> None:
    path, chance = tmp_path / "a.arrow", random.Random(7)
    written(path)
    as_polars(path)
    raw = path.read_bytes()
    footer, right = len(raw) - 10 - struct.unpack("<i", raw[-10:-6])[0], 0
    (tmp_path / "b.arrow").write_bytes(raw)
    for number in scaled_range(50):
        forged = bytearray(raw)
        for _ in range(chance.choice([1, 1, 3])):
            forged[chance.randrange(footer, len(raw) - 6)] = chance.choice(
                [0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)]
            )
        path = tmp_path / f"{number}.arrow"
        path.write_bytes(forged)
        try:
            with opened(path) as file:
                if not read_arrow_table(file, path.name).entry.fault:
                    right += bool(samples(path))
        except sp.ShardError as error:
            assert path.name in str(error) or "no sample in" in str(error)
    assert right > 3


def test_batch_missing_in_the_footer_is_not_lost_silently(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    raw = written(path)
    vector = raw.index(struct.pack("<I", 4) + blocks_of(path)[0], len(raw) // 2)
    for count in range(4):
        path.write_bytes(raw[:vector] + struct.pack("<I", count) + raw[vector + 4 :])
        with pytest.raises(sp.ShardError, match="the footer does not name the record batch at byte"):
            samples(path)


@pytest.mark.parametrize("length", [-1, 0, 1, 1 << 30])
def test_footer_of_an_impossible_length_is_rejected(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.arrow"
    raw = written(path)
    path.write_bytes(raw[:-10] + struct.pack("<i", length) + raw[-6:])
    with pytest.raises(sp.ShardError, match=r"a\.arrow: a.* footer .*copy it again"):
        samples(path)


def test_feather_version_1_is_an_error_with_a_fix(tmp_path: Path) -> None:
    path = tmp_path / "a.feather"
    path.write_bytes(b"FEA1" + bytes(40) + b"FEA1")
    with pytest.raises(sp.ShardError, match=r"a\.feather: Feather version 1, .*feather\.write_feather"):
        samples(path)


def test_polars_files_are_read_like_by_pyarrow(tmp_path: Path) -> None:
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"id": range(300), "txt": [f"text {n}" if n % 7 else None for n in range(300)]})
    for compression in ("uncompressed", "lz4", "zstd"):
        for level in (pl.CompatLevel.oldest(), pl.CompatLevel.newest()):
            for rows in (None, 1, 70):
                path = tmp_path / f"{compression}-{rows}-{level is pl.CompatLevel.oldest()}.arrow"
                frame.write_ipc(path, compression=compression, record_batch_size=rows, compat_level=level)
                found = [each.get("txt", b"").decode() or None for each in samples(path)]
                assert found == pa.ipc.open_file(path).read_all()["txt"].to_pylist()
            path = tmp_path / f"{compression}-{level}.stream.arrow"
            frame.write_ipc_stream(path, compression=compression, compat_level=level)
            assert len(samples(path)) == 300


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_numbers_in_big_endian_order_are_rejected_by_name(tmp_path: Path, new: Any) -> None:
    path, table = tmp_path / "big.arrow", pa.table({"id": pa.array([1, 2], pa.int32())})
    with new(path, table.schema) as file:
        file.write_table(table)
    # The schema's first field, the byte order, is left out for little-endian. Here it points to the number of columns,
    # 1, which means big-endian.
    raw = path.read_bytes().replace(bytes.fromhex("0800080000000400"), bytes.fromhex("0800080008000400"))
    opens = pa.ipc.open_file if new is pa.ipc.new_file else pa.ipc.open_stream
    assert opens(pa.BufferReader(raw)).read_all()["id"].to_pylist() == [1 << 24, 2 << 24]  # pyarrow turns them around
    path.write_bytes(raw)
    with pytest.raises(sp.ShardError, match="big-endian, which are not read; write what"):
        sp.open_dataset(path)


def test_column_of_a_type_unknown_to_pyarrow_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    table = pa.table({"i": pa.array([pa.MonthDayNano([1, 2, 3])])})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    raw = (tmp_path / "a.arrow").read_bytes()
    for place in (place for place, byte in enumerate(raw) if byte == 2):  # the unit of intervals is one of them
        months = raw[:place] + bytes(1) + raw[place + 1 :]
        try:
            pa.ipc.open_stream(months).read_next_batch().columns  # noqa: B018
        except KeyError:
            (tmp_path / "a.arrow").write_bytes(months)
            break
        except (pa.ArrowException, OSError):
            pass
    with pytest.raises(ShardError, match=r"a\.arrow: pyarrow does not read a column's type"):
        sp.open_dataset(tmp_path / "a.arrow")[0]["i"]
