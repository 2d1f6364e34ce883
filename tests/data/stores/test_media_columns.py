"""Columns of images: what a row names without its bytes is an error, and a list of images is a part for each."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.stores.arrow_columns import ArrowRows, BrokenColumnError, MediaListColumn, NamedFile
from tests.data.stores.test_columnar_store import STORES, every_store, parts_of, write

MEDIA = pa.struct({"bytes": pa.binary(), "path": pa.string()})
READERS: dict[str, Any] = {"a.parquet": custom.ParquetReader, "a.arrow": custom.ArrowReader}


def named(path: str | None, data: bytes | None = None) -> dict[str, Any]:
    return {"bytes": data, "path": path}


def table(images: list[Any], kind: Any = MEDIA, column: str = "image") -> Any:
    return pa.table({column: pa.array(images, kind), "caption": [f"c{i}" for i in range(len(images))]})


@every_store
def test_a_row_with_a_path_and_no_bytes_is_an_error_by_column_that_names_the_command(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, table([named(f"{i}.png") for i in range(6)]))
    said = r"row 0: the column 'image' holds '0.png' and no bytes \(6 of 6 rows have a path and no bytes\); .*"
    said += rf"`savable convert {path} DST --files-from FOLDER`"
    with pytest.raises(sp.ShardError, match=said) as error:
        list(next(READERS[name](path, sp.Lane(), shuffle=False)))
    assert error.value.reason == "path without bytes"
    with pytest.raises(sp.ShardError, match="6 of 6 rows"):  # of any part: the row is not whole
        sp.open_dataset(path)[3].text("caption")
    assert sp.open_dataset(path, columns=["caption"])[3].text("caption") == "c3"


@every_store
@pytest.mark.parametrize("in_lists", [False, True])
def test_bytes_field_may_have_null_type_if_all_are_null(tmp_path: Path, name: str, in_lists: bool) -> None:
    images: list[Any] = [named("0.png"), named("1.png")]
    rows = pa.Table.from_pylist([{"image": [image] if in_lists else image} for image in images])
    with pytest.raises(sp.ShardError, match=r"'1\.png' and no bytes \(2 of 2 rows"):
        STORES[name](write(tmp_path / name, rows)).extensions(0, 1)


@every_store
def test_image_knows_its_column(tmp_path: Path, name: str) -> None:
    samples = sp.open_dataset(write(tmp_path / name, table([named("0.png", b"0"), None])))
    first, second = samples
    assert (list(first), first["image"], first.get("image"), "image" in first) == (["png", "caption"], b"0", b"0", True)
    assert (list(second), second.get("image"), "image" in second, "png" in second) == (["caption"], None, False, False)


@every_store
def test_skip_drops_and_counts_only_rows_without_bytes(tmp_path: Path, name: str) -> None:
    images = [named("0.png", b"0"), named("1.png"), None, named(None), named(""), named("5.png", b"5")]
    path = write(tmp_path / name, table(images), rows=4)

    def pipeline(lane: sp.Lane) -> Any:
        return sp.Batcher(sp.Encode(READERS[name](path, lane, epochs=1, on_error="skip"), Names()), size=1)

    with sp.SavableLoader(pipeline, seed=1, lanes=1) as loader:
        found = sorted(row for batch in loader for row in batch)
        skipped = {key: value for key, value in loader.stats().items() if "path without bytes" in key}
    assert found == [("c0", ["png", "caption"]), ("c2", ["caption"]), ("c3", ["caption"]), ("c4", ["caption"]),
                     ("c5", ["png", "caption"])]  # fmt: skip
    assert 1 in skipped.values()


class Names(sp.TaskEncoder):
    """The caption and the parts of a sample."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.text("caption"), list(sample)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


@every_store
def test_partial_store_reports_nulls_and_named_files(tmp_path: Path, name: str) -> None:
    rows = table([named("d/0.png"), None, named(None), named("noend"), named("e.jpg", b"e")])
    store = STORES[name](write(tmp_path / name, rows), partial=True)
    assert [list(store.extensions(0, row)) for row in range(5)] == [["caption"]] * 4 + [["jpg", "caption"]]
    assert [store.nulls(0, row) for row in range(5)] == [[], ["image"], ["image"], [], []]
    assert [store.named_files(0, row) for row in range(5)] == [
        [NamedFile("image", "d/0.png", "png")], [], [], [NamedFile("image", "noend", "")], []
    ]  # fmt: skip


LISTS = [[named("a.PNG", b"a"), named(None, b"GIF8b")], [], None, [named("c.jpg", b"c"), None, named("d.jpg", b"d")]]


@every_store
@pytest.mark.parametrize("kind", [pa.list_(MEDIA), pa.large_list(MEDIA)])
def test_a_list_of_images_is_a_part_for_each(tmp_path: Path, name: str, kind: Any) -> None:
    store = STORES[name](write(tmp_path / name, table(LISTS, kind), rows=3))
    assert [parts_of(store, row) for row in range(4)] == [
        {"0.PNG": b"a", "1.gif": b"GIF8b", "caption": b"c0"},
        {"caption": b"c1"},
        {"caption": b"c2"},
        {"0.jpg": b"c", "2.jpg": b"d", "caption": b"c3"},
    ]
    assert [store.nulls(0, row) for row in range(4)] == [[], [], ["image"], ["image"]]
    with pytest.raises(KeyError, match=r"no part 'image'; the sample has 0\.PNG, 1\.gif, caption"):
        store.read(0, 0, "image")


@pytest.mark.parametrize("ends", [[0, 5], [2, 1], [-1, 1]])
def test_wrong_list_offsets_are_an_error(ends: list[int]) -> None:
    items = pa.array([named("a.png", b"a"), named("b.png", b"b")], MEDIA)
    offsets = bytearray(8)
    buffers = [None, pa.py_buffer(offsets)]
    column = MediaListColumn(pa.Array.from_buffers(pa.list_(MEDIA), 1, buffers, children=[items]))
    offsets[:] = b"".join(end.to_bytes(4, "little", signed=True) for end in ends)  # pyarrow has looked at it before
    with pytest.raises(BrokenColumnError, match="spans elements"):
        column.elements(0)
    with pytest.raises(BrokenColumnError, match="is outside"):
        column.elements(1)


@every_store
def test_several_image_lists_are_named_by_column_but_not_a_single_image(tmp_path: Path, name: str) -> None:
    images = pa.array([[named("a.png", b"a")]], pa.list_(MEDIA))
    rows = pa.table({"left": images, "right": images, "mask": pa.array([named("m.png", b"m")], MEDIA)})
    store = STORES[name](write(tmp_path / name, rows))
    assert store.extensions(0, 0) == ["left.0.png", "right.0.png", "png"]


@every_store
def test_list_element_without_bytes_is_an_error(tmp_path: Path, name: str) -> None:
    lists = [[named("a.png", b"a")], [named("b.png", b"b"), named("c.png")]]
    path = write(tmp_path / name, table(lists, pa.list_(MEDIA)))
    store = STORES[name](path)
    assert store.extensions(0, 0) == ["0.png", "caption"]
    with pytest.raises(sp.ShardError, match=r"row 1: .*'c\.png' and no bytes \(1 of 2 rows"):
        store.read(0, 1, "0.png")
    without = STORES[name](path, partial=True)
    assert parts_of(without, 1) == {"0.png": b"b", "caption": b"c1"}
    assert without.named_files(0, 1) == [NamedFile("image", "c.png", "1.png")]


def test_buffered_rows_have_the_same_parts_and_errors() -> None:
    lists = [[named("a.png", b"a"), named("b.png", b"b")], [named("c.png")]]
    rows = ArrowRows(table(lists, pa.list_(MEDIA)).to_batches(), constants={"year": b"2"})
    kept = rows.retain(0)
    assert kept.extensions(0) == ["0.png", "1.png", "caption", "year"]
    assert [kept.read(0, part) for part in kept.extensions(0)] == [b"a", b"b", b"c0", b"2"]
    with pytest.raises(ValueError, match=r"'c\.png' and no bytes"):
        rows.retain(1).read(0, "caption")


def picture(seed: int) -> bytes:
    """A PNG."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (seed, 2 * seed, 255)).save(file, "PNG")
    return file.getvalue()


VIEWS = pa.struct({"bytes": pa.binary_view(), "path": pa.string_view()})
PICTURES = [named(f"{i}.png", picture(i)) for i in range(8)]
every_view = pytest.mark.parametrize(
    ("name", "images", "kind"),
    [
        ("a.parquet", PICTURES, VIEWS),  # pyarrow writes no others in Parquet
        ("a.arrow", PICTURES, VIEWS),
        ("a.arrow", PICTURES, pa.struct({"path": pa.string(), "bytes": pa.binary_view()})),
        ("a.arrow", [[each, None, each] for each in PICTURES], pa.large_list(VIEWS)),
        ("a.arrow", [[each, each] for each in PICTURES], pa.list_(VIEWS, 2)),
    ],
)


def without_views(kind: Any) -> Any:
    if pa.types.is_struct(kind):
        return MEDIA
    return pa.list_(MEDIA, *([kind.list_size] if pa.types.is_fixed_size_list(kind) else []))


@every_view
def test_image_views_are_the_same_parts_as_images(tmp_path: Path, name: str, images: list[Any], kind: Any) -> None:
    plain = STORES[name](write(tmp_path / "plain" / name, table([*images, None], without_views(kind))))
    viewed = STORES[name](
        write(tmp_path / "viewed" / name, table([*images, None], kind), rows=4 if name == "a.arrow" else 9)
    )
    found = [parts_of(viewed, row) for row in range(9)]
    assert found == [parts_of(plain, row) for row in range(9)]
    assert PICTURES[3]["bytes"] in found[3].values() and all(part.endswith(("png", "caption")) for part in found[3])
    assert set(found[8]) == {"caption"}


def test_image_views_are_converted_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", table([[each, each] for each in PICTURES], pa.list_(VIEWS, 2)))
    sp.convert(path, tmp_path / "shards")
    read, stored = sp.open_dataset(tmp_path / "shards"), sp.open_dataset(path)
    assert [dict(read[row]) for row in range(8)] == [dict(stored[row]) for row in range(8)]
    assert PICTURES[3]["bytes"] in dict(read[3]).values()


@every_store
def test_image_view_without_bytes_names_its_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, table([named("0.png"), *PICTURES], VIEWS))
    with pytest.raises(sp.ShardError, match=r"holds '0\.png' and no bytes \(1 of 9"):
        list(sp.open_dataset(path)[0])


NO_PATHS = pa.struct({"bytes": pa.binary(), "path": pa.null()})


@pytest.mark.parametrize(
    ("name", "kind", "column"),
    [
        ("a.parquet", pa.binary(), "image"),
        ("a.arrow", pa.binary(), "IMG"),
        ("a.arrow", pa.large_binary(), "image"),
        ("a.arrow", pa.binary_view(), "image"),  # pyarrow writes no views of bytes in Parquet
    ],
)
def test_bytes_of_images_in_a_column_of_that_name_are_images(tmp_path: Path, name: str, kind: Any, column: str) -> None:
    jpeg = io.BytesIO()
    Image.new("RGB", (2, 3)).save(jpeg, "JPEG")
    values = [picture(1), jpeg.getvalue(), None, b"no image", b""]
    path = write(tmp_path / name, table(values, kind, column), rows=2)
    samples = list(sp.open_dataset(path))
    assert [list(sample) for sample in samples] == [
        ["png", "caption"],
        ["jpg", "caption"],
        ["caption"],
        [column, "caption"],
        [column, "caption"],
    ]
    assert [sample.get(column) for sample in samples] == values
    assert (samples[0].image().size, samples[1].image().size) == ((8, 8), (2, 3))
    assert [STORES[name](path).nulls(0, row) for row in range(3)] == [[], [], [column]]
    assert parts_of(STORES[name](path), 0) == dict(samples[0])
    assert sp.convert(path, tmp_path / "shards").samples == 5
    assert [dict(sample) for sample in sp.open_dataset(tmp_path / "shards")] == [
        dict(sorted(dict(sample).items())) for sample in samples
    ]


@every_store
def test_ambiguous_image_columns_are_named_by_column(tmp_path: Path, name: str) -> None:
    columns = {"image": [picture(1)], "img": [picture(2)], "vector": [b"BM no image by its column's name"]}
    (sample,) = sp.open_dataset(write(tmp_path / name, pa.table(columns)))
    assert list(sample) == ["image.png", "img.png", "vector"] and sample["img"] == picture(2)
    (sample,) = sp.open_dataset(write(tmp_path / "one" / name, pa.table({"image": [picture(1)], "png": ["a text"]})))
    assert list(sample) == ["image.png", "png"]


@every_store
@pytest.mark.parametrize("kind", [NO_PATHS, pa.list_(NO_PATHS), pa.list_(NO_PATHS, 2)])
def test_images_with_null_typed_paths_are_images(tmp_path: Path, name: str, kind: Any) -> None:
    listed = kind != NO_PATHS
    images = [[named(None, picture(i))] * 2 if listed else named(None, picture(i)) for i in range(3)]
    store = STORES[name](write(tmp_path / name, table(images, kind), rows=2))
    parts = ["0.png", "1.png"] if listed else ["png"]
    assert [store.extensions(0, row) for row in range(3)] == [[*parts, "caption"]] * 3
    assert [store.read(0, row, parts[-1]) for row in range(3)] == [picture(i) for i in range(3)]
    assert not any(store.named_files(0, row) for row in range(3))
