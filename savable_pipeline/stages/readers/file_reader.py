"""`FileReader`: reads the files of one kind; the readers of readers.py are its names, each with the kind's options."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.shards.paths import Shards, as_names
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.file_hashes import known_hash
from savable_pipeline.data.stores.grouped_store import DecodedBlocks
from savable_pipeline.data.stores.source import STORES
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderData, ReaderSettings

_NOT_SAVED = {"cache", "cache_bytes", "files_from", "validate_hash"}  # options that change no sample


class FileReader(RecordReader):
    """Yields the samples of a lane's share of files of a `kind`: see source.py, whose store takes the options."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        """A name for files of this kind: `inspect.signature` shows the settings of all readers for its `**settings`."""
        super().__init_subclass__()
        if kind:
            cls.kind = kind
            shown, usual = inspect.signature(cls.__init__), inspect.signature(RecordReader.__init__).parameters
            common = [usual[name] for name in ReaderSettings.__annotations__]
            parameters = [*list(shown.parameters.values())[:-1], *common]
            vars(cls)["__init__"].__signature__ = shown.replace(parameters=parameters)

    def __init__(self, files: Shards, lane: Lane, options: dict[str, Any], common: ReaderSettings) -> None:
        self.files = as_names(files)
        self.options = _checked(type(self).__name__, self.kind, options)
        known = STORES[self.kind].settings
        most: Any = options.get("cache_bytes")
        given = {name: value for name, value in self.options.items() if name in known and value is not None}
        cache = options.get("cache"), most
        if "blocks" in known:
            cache, given["blocks"] = (None, None), lane.shared(("decoded", most), lambda: DecodedBlocks(most))
        if "unpacked_bytes" in known:
            given["unpacked_bytes"] = common.get("unpacked_bytes", UNPACKED_BYTES)
        named = tuple((name, repr(value)) for name, value in self.options.items())
        super().__init__(ReaderData.of_files(self.kind, self.files, lane, named, cache, **given), lane, **common)

    def settings(self) -> dict[str, Any]:
        """The settings of every reader, and the options that change samples; of fields of files those that are used."""
        saved = {name: value for name, value in self.options.items() if name not in _NOT_SAVED}
        if "file_fields" in saved:
            saved["file_fields"] = getattr(self.dataset.store, "fields", None)
        if "key_end" in saved:
            saved["key_end"] = saved["key_end"] or "first"
        return {**super().settings(), **saved}


def _checked(reader: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options with tuples for sequences. Raises ValueError for values that the kind does not have."""
    found = {**options}
    for name in ("columns", "file_fields"):
        if found.get(name) is not None:
            found[name] = tuple(found[name])
    for part, columns in (found.get("ranges") or {}).items():
        if isinstance(columns, str) or len(columns) != 3 or columns[0] is None:
            raise ValueError(f"ranges: {part!r} is (path, begin, end), names of three columns, not {columns!r}")
    if found.get("ranges") is not None:
        found["ranges"] = {part: [*columns] for part, columns in found["ranges"].items()}
    if kind == "jsonl" and found["file_fields"] is None and found["files_from"] is not None:
        raise ValueError(f"{reader}: files_from is for the fields that file_fields names")
    if (end := found.get("key_end")) not in ("first", "last", None):
        raise ValueError(f"{reader}: key_end must be 'first' or 'last', not {end!r}")
    if (algorithm := found.get("validate_hash")) is not None and known_hash([algorithm]) is None:
        raise ValueError(f"{reader}: validate_hash is an algorithm of hashlib or xxhash, not {algorithm!r}")
    if kind == "tokens":
        from savable_pipeline.data.stores.token_store import check_token_settings  # here: the other readers need none

        check_token_settings(**found)
    return found
