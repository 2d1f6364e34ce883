"""Records of MDS and LitData as the samples of a conversion, numbered in the order of their index.json."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from savable_pipeline.data.stores.record_fields import Blob, RecordError, Value, parts_of
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.convert.folder import add_sample
from savable_pipeline.tools.convert.model import Input, Part, Reject
from savable_pipeline.tools.convert.names import printable
from savable_pipeline.tools.convert.stored import opened_input


def read_records(path: Path | str, key_field: str | None, unpacked_bytes: int) -> Input:
    """The samples of a folder with an index.json; the key of one is its number, or what the field of a record holds.

    Raises ValueError for a folder, or a file of it, that cannot be read at all.
    """
    from savable_pipeline.data.stores.record_folder_store import RecordFolderStore  # other sources do without

    try:
        dataset, found = opened_input(path, unpacked_bytes)
        store, seen, number = dataset.store, set[str](), 0
        assert isinstance(store, RecordFolderStore)
        order = store.listed_order()
        found.digest = hashlib.sha256(f"{found.digest} {order}".encode()).hexdigest()
        for shard, later in zip(order, [*order[1:], None], strict=True):
            for each in (shard, later) if number == 0 else (later,):
                if each is not None:
                    store.prefetch(np.arange(dataset.firsts[each], dataset.firsts[each + 1]))
            store.validate(shard)
            for row in range(store.entries[shard].samples):
                _add(found, store, shard, row, number, key_field, seen)
                number += 1
    except ShardError as error:
        raise ValueError(str(error)) from error
    return found


def _add(found: Input, store: Any, shard: int, row: int, number: int, key_field: str | None, seen: set[str]) -> None:
    """Add the sample of a record, or its reject; `seen` are the keys before it."""
    name, key = store.entries[shard].name, f"{number:09d}"
    place = f"{name}, record {number}"
    try:
        fields = store.record(shard, row)
        if key_field is not None:
            key = _key(fields, key_field, seen)
        parts = [(Part(extension, name, blob.size), "") for extension, blob in parts_of(fields).items()]
        if not parts:
            raise RecordError("no field: a record without any")
    except RecordError as error:
        reason, _, detail = str(error).partition(": ")
        found.rejected.append(Reject(place, printable(key), reason, printable(detail)))
        return
    if add_sample(found, key, parts, int(store.firsts[shard]) + row):
        seen.add(key)
    else:
        last = found.rejected[-1]
        found.rejected[-1] = Reject(place, last.key, last.reason, last.detail)


def _key(fields: list[Value | Blob], name: str, seen: set[str]) -> str:
    value: Any = next((field.value for field in fields if isinstance(field, Value) and field.name == name), None)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RecordError(f"no key: the field {name!r} holds {value!r}")
    if str(value) in seen:
        raise RecordError(f"duplicate key: {value!r} is the key of a record before it")
    return str(value)
