"""Values of columns: numbers as arrays of their own type; moments and spans alike with and without pandas."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.stores.opening import open_store
from tests.data.stores.test_columnar_store import write

every_store = pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
NUMBERS: dict[str, Any] = {
    "input_ids": pa.array([[91, 53], [], [7]], pa.list_(pa.int32())),
    "large": pa.array([[1], [2, 3], [4]], pa.large_list(pa.uint16())),
    "box": pa.array([[1.5, 2.5], [3, 4], [float("nan"), -0.0]], pa.list_(pa.float32(), 2)),
    "grid": pa.array([[[1, 2], [3, 4]], [[5, 6]], []], pa.list_(pa.list_(pa.int8()))),
    "half": pa.array([[1.5], [2], []], pa.list_(pa.float16())),
    "flags": pa.array([[True, False], [], [True]], pa.list_(pa.bool_())),
    "score": pa.array([0.1, 2, 3], pa.float32()),
    "label": pa.array([1, 2, -3], pa.int64()),
    "good": pa.array([True, False, True]),
}


def expected(column: Any, row: int) -> Any:
    """By NumPy, from Python's lists."""
    kind = column.type
    while pa.types.is_nested(kind):
        kind = kind.value_type
    return np.array(column[row].as_py(), kind.to_pandas_dtype())


@every_store
@pytest.mark.parametrize("rows", [3, 20_000])  # large batches of Arrow are read value by value
def test_numbers_and_number_lists_are_arrays_of_their_type(tmp_path: Path, name: str, rows: int) -> None:
    columns = {column: pa.concat_arrays([each] * (rows // 3)) for column, each in NUMBERS.items()}
    store: Any = open_store(write(tmp_path / name, pa.table(columns), 30_000), format=name[2:])
    for column, values in NUMBERS.items():
        for row in range(3):
            found, want = store.array(0, rows // 3 * 3 - 3 + row, column), expected(values, row)
            assert found.dtype == want.dtype and found.flags.writeable
            assert np.array_equal(found.ravel(), want.ravel(), equal_nan=found.dtype.kind == "f")
            assert found.shape == want.shape or not found.size
    assert store.array(0, 0, "INPUT_IDS").tolist() == [91, 53]


@every_store
@pytest.mark.parametrize("rows", [3, 20_000])
@pytest.mark.parametrize("order", [None, [2, 1, 0], [0, 2, 1]])
def test_fixed_shape_tensors_are_arrays_and_nested_lists_of_their_shape(
    tmp_path: Path, name: str, rows: int, order: list[int] | None
) -> None:
    kind = pa.fixed_shape_tensor(pa.int16(), [2, 3, 4], permutation=order)
    stored = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 24).astype(np.int16)), 24)
    tensors = pa.ExtensionArray.from_storage(kind, stored)
    store: Any = open_store(write(tmp_path / name, pa.table({"x": tensors}), 30_000), format=name[2:])
    for row in (0, rows - 1):
        found, want = store.array(0, row, "x"), tensors.to_numpy_ndarray()[row]
        assert found.dtype == np.int16 and found.flags.writeable and np.array_equal(found, want)
        assert json.loads(store.read(0, row, "x")) == want.tolist()


@every_store
def test_tensor_of_a_permutation_that_pyarrow_swaps_is_an_error(tmp_path: Path, name: str) -> None:
    """A view of channels first, of images with channels last: pyarrow itself reads other values than it wrote."""
    images = np.arange(48, dtype=np.int16).reshape(2, 2, 4, 3).transpose(0, 3, 1, 2)
    written = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    assert not np.array_equal(written.to_numpy_ndarray(), images)
    sample = sp.open_dataset(write(tmp_path / name, pa.table({"x": written})))[0]
    for get in (sample.array, sample.json):
        with pytest.raises(sp.ShardError, match=r"permutation \[1, 2, 0\], which pyarrow swaps\. Write them without"):
            get("x")


@every_store
def test_buffered_row_returns_the_same_arrays(tmp_path: Path, name: str) -> None:
    table = pa.table({"ids": [[i, i + 1] for i in range(300)], "tags": [["x"]] * 300})
    write(tmp_path / name, table, 10)
    reader = {"a.parquet": custom.ParquetReader, "a.arrow": custom.ArrowReader}[name]
    samples = sp.ShuffleBuffer(reader(tmp_path, sp.Lane(), shuffle=False, epochs=1, cache_bytes=2000), size=100)
    for sample in samples:
        row = int(sample.key.rpartition(":")[2])
        assert sample.array("ids").tolist() == [row, row + 1] and sample.array("ids").dtype == np.int64
        with pytest.raises(TypeError, match="the part 'tags' is not an array of numbers: of the type string"):
            sample.array("tags")


@every_store
def test_non_numeric_array_is_an_error_that_names_the_method_to_use(tmp_path: Path, name: str) -> None:
    table = pa.table({
        "ragged": [[[1], [2, 3]]], "holes": [[1, None]], "tags": [["a"]], "when": [datetime(2026, 1, 2)],
        "point": [{"x": 1}], "txt": ["text"], "none": pa.nulls(1, pa.list_(pa.int8())),
    })  # fmt: skip
    sample = sp.open_dataset(write(tmp_path / name, table))[0]
    for part in ("ragged", "holes", "tags", "when", "point"):
        with pytest.raises(TypeError, match=rf"'{part}' is not an array of numbers: .*\. Use sample\.json\('{part}"):
            sample.array(part)
    assert sample.array("txt").tobytes() == b"text"
    with pytest.raises(KeyError, match="no part 'none'"):
        sample.array("none")


MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678000)
TIMES: dict[str, tuple[Any, Any]] = {
    "dur": (pa.array([5000], pa.duration("ns")), 5e-06),
    "dur_s": (pa.array([90], pa.duration("s")), 90.0),
    "long": (pa.array([timedelta(days=3, microseconds=7)], pa.duration("us")), 259200.000007),
    "ns": (pa.array([1], pa.timestamp("ns")), "1970-01-01T00:00:00.000000001"),
    "before": (pa.array([-1], pa.timestamp("ns")), "1969-12-31T23:59:59.999999999"),
    "us": (pa.array([MOMENT], pa.timestamp("us")), MOMENT.isoformat()),
    "ms": (pa.array([MOMENT], pa.timestamp("ms")), MOMENT.isoformat()),
    "s": (pa.array([MOMENT.replace(microsecond=0)], pa.timestamp("s")), "2026-01-02T03:04:05"),
    "in_ns": (pa.array([MOMENT], pa.timestamp("ns")), MOMENT.isoformat()),
    "zone": (
        pa.array([MOMENT.replace(tzinfo=UTC)], pa.timestamp("us", "Europe/Berlin")), f"{MOMENT.isoformat()}+00:00",
    ),
    "time": (pa.array([1], pa.time64("ns")), "00:00:00.000000001"),
    "minute": (pa.array([60_000], pa.time32("ms")), "00:01:00"),
    "list": (pa.array([[1, None]], pa.list_(pa.timestamp("ns"))), ["1970-01-01T00:00:00.000000001", None]),
    "struct": (
        pa.array([{"at": 1, "n": 2}], pa.struct({"at": pa.duration("ns"), "n": pa.int8()})), {"at": 1e-09, "n": 2},
    ),
}  # fmt: skip


@every_store
def test_timestamps_and_durations_are_formatted_from_integers(tmp_path: Path, name: str) -> None:
    table = pa.table({column: values for column, (values, _) in TIMES.items()})
    sample = sp.open_dataset(write(tmp_path / name, table))[0]
    assert {part: sample.json(part) for part in sample} == {column: value for column, (_, value) in TIMES.items()}
