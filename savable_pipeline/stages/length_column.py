"""`LengthColumn`: lengths of items in a column of Parquet or Arrow files.

No other column is read for them.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import msgspec

from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.sample import JoinedParts, Sample
from savable_pipeline.data.stores.formats import format_named
from savable_pipeline.data.stores.grouped_store import DecodedBlocks
from savable_pipeline.errors import ShardError
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage

_DECODED_BYTES = 1 << 26  # most decoded bytes of the column in a process: 8 million rows of int64


class LengthColumn:
    """The column `name` of all files that the readers before a stage read.

    Raises ValueError for files of another format, or without this column.
    """

    def __init__(self, name: str, source: Stage) -> None:
        self._name, self._tables = name, dict[Any, Dataset]()
        for dataset in [stage.dataset for stage in upstream(source) if isinstance(stage, RecordReader)]:
            key = "length column", id(dataset), name
            self._tables[dataset] = source.lane.shared(key, partial(_open_column, dataset.store, name))
        self.datasets = tuple(self._tables.values())  # only this column of them is read

    def of(self, sample: Sample) -> int:
        """Return the length of a sample's item.

        Raises `ShardError` if it is null, or no whole number.
        """
        origin: Any = sample.origin
        while isinstance(origin, JoinedParts):
            origin = origin.own
        row = sample.read_from(self._tables[origin])
        length = -1.0
        with contextlib.suppress(KeyError, ValueError):  # a null is no part of a sample
            length = msgspec.json.decode(row[self._name], type=float)  # pandas writes floats if the column has a null
        if length < 0 or not length.is_integer():
            fault = f"{row.shard}: {row.location}: column {self._name!r} has no whole number of tokens"
            raise ShardError(f'{fault}. Fix it, or pass on_error="skip".', reason="no length")
        return int(length)


def _open_column(store: Any, name: str) -> Dataset:
    """Return a dataset of one column of the files of a store."""
    kind = store.found.form.name if hasattr(store, "found") else ""
    if kind not in ("parquet", "arrow"):
        raise ValueError(f"length_column={name!r}: {store.address} is neither Parquet nor Arrow. Write length_of.")
    try:
        return Dataset(format_named(kind).store(store.found, columns=(name,), blocks=DecodedBlocks(_DECODED_BYTES)))
    except ValueError as error:
        fault = str(error).partition(". Pass columns=")[0]
        raise ValueError(f"length_column={name!r}: {fault}. Use one of these columns.") from None
