"""`reader_of`: the reader of whatever files a user names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.paths import Shards, as_names
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.source import STORES
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import source_at
from savable_pipeline.stages.readers.readers import READERS

Readable: TypeAlias = Shards | RecordStore | Callable[[], RecordStore]


def reader_of(path: Readable, lane: Lane, options: Mapping[str, Any]) -> RecordReader:
    """The reader of the files at `path`, of whichever kind, or of a store, which a function makes once a process.

    Raises ValueError for an option that readers of such files do not have, and what the reader raises.
    """
    if callable(path):
        path = lane.shared(("store", path), path)
    if not isinstance(path, str | os.PathLike | Iterable):
        return RecordReader(path, lane, **_checked("a store", RecordReader, options))
    names, cache = as_names(path), options.get("cache")
    where = cache, options.get("cache_bytes") if cache else None  # which alone may be those of a store that decodes
    source = source_at(names, "", lane, where)
    kind = source.kind.name
    reader: Any = next(each for name, each in READERS.items() if kind in (name, STORES[name].also))
    # the listing that told the kind is used to open them
    lane.shared(("source", names, reader.kind, where), lambda: source)
    made: RecordReader = reader(names, lane, **_checked(f"{names}: {kind} files", reader, options))
    return made


def _checked(files: str, reader: type[RecordReader], options: Mapping[str, Any]) -> Mapping[str, Any]:
    known = options_of(reader)
    wrong = [name for name in options if name not in known]
    if wrong:
        having = dict.fromkeys(each.__name__ for each in READERS.values() if wrong[0] in options_of(each))
        raise ValueError(
            f"{files} are read without {wrong[0]}=, which {listed([*having])} has; {reader.__name__} takes "
            f"{listed(known)}"
        )
    return options


def options_of(reader: type[RecordReader]) -> list[str]:
    """The names of the options of a reader."""
    return [name for name, each in inspect.signature(reader).parameters.items() if each.kind is each.KEYWORD_ONLY]
